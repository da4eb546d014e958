"""The graphs that plans are built from: one of every kind for each phase, with its record."""

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from export_grok import plugins
from export_grok.artifacts import Bundle, graph_file
from export_grok.config import Sums
from export_grok.engines.cut import SUM, cut
from export_grok.engines.trt.bindings import bindings_of
from export_grok.engines.trt.contract import check_contract
from export_grok.engines.trt.lower import lower_template
from export_grok.engines.trt.record import PHASES, GraphRecord, Sizes
from export_grok.export.contract import GRAPH_KINDS, GraphKind
from export_grok.export.graphs import content_of, read_graph
from export_grok.optional import require
from export_grok.plugins.plugin_graph import plugin_calls
from export_grok.plugins.ptx.compiler import kernel_hash
from export_grok.plugins.ptx.source import files_hash
from export_grok.plugins.registry import op_names
from export_grok.progress import progress_bar

__all__ = ["FOLDER", "StaticGraph", "kernel_hashes", "recipe", "static_graphs"]

FOLDER = "trt"
_PARTS = ("reference", "onnx_function", "trt_lowering", "trt_function", "triton_kernel")


@dataclass(frozen=True, kw_only=True)
class StaticGraph:
    """A lowered graph and its record."""

    model: ir.Model
    record: GraphRecord

    @property
    def content(self) -> bytes:
        """What its file holds."""
        return content_of(self.model)


def static_graphs(graphs: Bundle, sizes: Sizes, sums: Sums = "plan") -> tuple[StaticGraph, ...]:
    """Return the graph of every kind and phase, or its parts in their order.

    Args:
        graphs: folder with the templates of one rank; for more ranks they are traced.
        sizes: of the graphs.
        sums: where ranks are summed; "between" cuts the graphs there.

    Raises:
        BuildError: a graph is not one that TensorRT builds.
        MissingDependencyError: torch is not installed, and there are ranks.
    """
    manifest = graphs.manifest
    config, dtype, ranks = manifest.config, manifest.dtype, sizes.tensor_parallel
    made = []
    with progress_bar("graphs", len(GRAPH_KINDS) * len(PHASES), unit="graphs") as advance:
        for kind in GRAPH_KINDS:
            template = _template(graphs, kind, ranks)
            for phase in PHASES:
                model = lower_template(template, kind, dtype, sizes, phase)
                parts = [part.model for part in cut(model)] if sums == "between" else [model]
                crossing = _crossing(model, parts)
                for number, part in enumerate(parts):
                    check_contract(part)
                    nodes = Counter(node.op_type for node, _ in plugin_calls(part.graph))
                    variant = f"{phase}.{number}" if crossing else phase
                    record = GraphRecord(
                        kind=kind,
                        phase=phase,
                        file=f"{FOLDER}/{graph_file(kind, variant=variant)}",
                        bindings=bindings_of(part.graph, kind, config, dtype, ranks, crossing),
                        nodes=dict(sorted(nodes.items())),
                        part=number,
                    )
                    made.append(StaticGraph(model=part, record=record))
                advance(1)
    return tuple(made)


def kernel_hashes(graphs: Sequence[StaticGraph], sm: int) -> dict[str, str]:
    """Return for each plugin node of the graphs the hash of all kernels it is compiled to.

    Raises:
        ConfigError: kernels are not compiled for this architecture.
        MissingDependencyError: Triton is not installed.
    """
    hashes: dict[str, set[str]] = {}
    for graph in graphs:
        for node, call in plugin_calls(graph.model.graph):
            hashes.setdefault(node.op_type, set()).add(kernel_hash(node, call, sm))
    return {
        op_type: hashlib.sha256("".join(sorted(found)).encode()).hexdigest()
        for op_type, found in sorted(hashes.items())
    }


@functools.cache
def recipe() -> str:
    """Return the hash of all of ours that graphs and kernels are made by."""
    modules = [__name__, "export_grok.export.trace"]
    modules += [f"{plugins.__name__}.{op}.{part}" for op in op_names() for part in _PARTS]
    return hashlib.sha256("".join(map(files_hash, modules)).encode()).hexdigest()


def _crossing(model: ir.Model, parts: Sequence[ir.Model]) -> set[str]:
    """Return the names of what goes from part to part; none if nothing is cut."""
    made = {str(value.name) for part in parts for value in part.graph.outputs}
    inner = made - {str(value.name) for value in model.graph.outputs}
    return {*inner, SUM} if inner else inner


def _template(graphs: Bundle, kind: GraphKind, ranks: int) -> ir.Model:
    if ranks == 1:
        return read_graph(graphs.folder / graph_file(kind, variant="template"))
    require("torch", extra="export")
    from export_grok.export.trace import template_from_config

    manifest = graphs.manifest
    return template_from_config(kind, manifest.config, manifest.dtype, manifest.head, ranks)
