"""The graphs that plans are built from, lowered once more in float32: a CPU can run those.

It is the same lowering of the same model for the same sizes; ONNX Runtime has no kernels for
bfloat16 on a CPU. That the graphs of the bundle are made by this lowering is checked first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from export_grok.artifacts import Bundle
from export_grok.config import Dtype
from export_grok.engines.assembly import SHARED
from export_grok.engines.cut import cut
from export_grok.engines.taps import PREFIX, tapped, taps_of
from export_grok.engines.trt.bindings import bindings_of
from export_grok.engines.trt.graphs import static_graphs
from export_grok.engines.trt.lower import lower_template
from export_grok.engines.trt.record import PHASES, Binding, Phase, TrtRecord
from export_grok.errors import BundleError
from export_grok.export.contract import GRAPH_KINDS, GraphKind
from export_grok.optional import require
from export_grok.progress import progress_bar

__all__ = ["DTYPE", "Twin", "check_graphs", "twins_of"]

DTYPE: Dtype = "float32"


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A graph of one kind for one phase, with what a layer computes on its way as outputs.

    Attributes:
        kind: of the graph.
        phase: decode or prefill.
        parts: graphs of a rank, one behind each sum over ranks.
        cuts: axis that ranks share, by the name of a weight.
        bindings: inputs and outputs of the whole model, all ranks together.
    """

    kind: GraphKind
    phase: Phase
    parts: tuple[ir.Model, ...]
    cuts: dict[str, int | None]
    bindings: tuple[Binding, ...]


def check_graphs(bundle: Bundle, record: TrtRecord) -> None:
    """Hold the graphs of a bundle, which its plans are built from, to what they are now made as.

    Raises:
        BundleError: they were made by another version of the program, and twins would be others.
        MissingDependencyError: torch is not installed, and there are ranks.
    """
    made = static_graphs(bundle, record.sizes, record.sums)
    same = tuple(graph.record for graph in made) == record.graphs and all(
        (bundle.folder / graph.record.file).read_bytes() == graph.content for graph in made
    )
    if not same:
        raise BundleError(
            f"the graphs in {bundle.folder} are not those that are made here and now, by another "
            "version of export-grok, torch or onnxscript: to interpret what the plans are built "
            "from, build the engine again"
        )


def twins_of(bundle: Bundle, record: TrtRecord) -> tuple[Twin, ...]:
    """Return the twin of every graph.

    Raises:
        BuildError: a graph cannot be lowered.
        MissingDependencyError: torch is not installed.
    """
    require("torch", extra="verify")
    from export_grok.export.trace import template_from_config

    manifest, sizes = bundle.manifest, record.sizes
    config, ranks = manifest.config, sizes.tensor_parallel
    made = []
    with progress_bar("graphs", len(GRAPH_KINDS) * len(PHASES), unit="graphs") as advance:
        for kind in GRAPH_KINDS:
            template = template_from_config(kind, config, DTYPE, manifest.head, ranks)
            taps = {tap: str(value.name) for tap, value in taps_of(template).items()}
            for phase in PHASES:
                model = lower_template(template, kind, DTYPE, sizes, phase)
                bindings = bindings_of(model.graph, kind, config, DTYPE, ranks)
                model = tapped(model, taps)
                further = _further(model.graph.outputs)
                made.append(
                    Twin(
                        kind=kind,
                        phase=phase,
                        parts=tuple(part.model for part in cut(model)),
                        cuts={row.name: row.cut for row in bindings if row.weight is not None},
                        bindings=tuple(
                            _whole(row, ranks)
                            for row in (*bindings, *further)
                            if row.name != "first"  # a rank's own
                        ),
                    )
                )
                advance(1)
    return tuple(made)


def _further(outputs: Sequence[ir.Value]) -> list[Binding]:
    """Return what is shown of a graph besides its outputs."""
    return [
        Binding(
            name=str(value.name).removeprefix(PREFIX),
            direction="out",
            shape=tuple(axis for axis in value.shape or () if isinstance(axis, int)),
            dtype="int64" if value.dtype == ir.DataType.INT64 else DTYPE,
        )
        for value in outputs
        if str(value.name).startswith(PREFIX)
    ]


def _whole(row: Binding, ranks: int) -> Binding:
    """Return what all ranks have of an input or output, given what one has."""
    axis = SHARED.get(row.name) if row.weight is None else row.cut
    if axis is None:
        return row
    shape = list(row.shape)
    shape[axis] *= ranks
    return replace(row, shape=tuple(shape), cut=None)
