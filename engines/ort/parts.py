"""The graphs of a rank: traced with its share of the model, stamped, and cut at the sums."""

from collections.abc import Iterator

import onnx_ir as ir

from export_grok.artifacts import RANK_GRAPHS, Bundle, graph_file
from export_grok.engines.cut import cut
from export_grok.export.contract import GRAPH_KINDS, GraphKind
from export_grok.export.graphs import stamped
from export_grok.optional import require
from export_grok.progress import progress_bar
from export_grok.weights import WeightIndex

__all__ = ["rank_parts"]


def rank_parts(graphs: Bundle, index: WeightIndex, ranks: int) -> Iterator[dict[str, ir.Model]]:
    """Yield the parts of each graph by the names of their files; the layers first.

    Args:
        graphs: folder of the graphs of the whole model.
        index: where the weights of a rank lie. The parts name files relative to its root, so they
            are those of every rank.
        ranks: that share the model.

    Raises:
        BuildError: a graph is not that of these weights.
        MissingDependencyError: torch is not installed.
    """
    require("torch", extra="export")
    from export_grok.export.trace import template_from_config

    manifest = graphs.manifest
    config, dtype = manifest.config, manifest.dtype
    templates = {}
    with progress_bar("tracing", len(GRAPH_KINDS), unit="graphs") as advance:
        for kind in GRAPH_KINDS:
            templates[kind] = template_from_config(kind, config, dtype, manifest.head, ranks)
            advance(1)

    layers: list[tuple[GraphKind, int | None]] = [
        ("layer", layer) for layer in range(config.num_layers)
    ]
    for kind, layer in [*layers, ("embedding", None), ("head", None), ("head_all", None)]:
        model = stamped(
            templates[kind], kind, config, dtype, index, layer=layer, tensor_parallel=ranks
        )
        yield {
            f"{RANK_GRAPHS}/{graph_file(kind, layer, variant=str(number))}": part.model
            for number, part in enumerate(cut(model))
        }
