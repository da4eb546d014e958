"""Replace the ops of a graph by what a backend has for them, and count what was replaced."""

from collections import Counter
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass, RemoveUnusedFunctionsPass
from onnx_ir.tape import Tape

from export_grok.errors import BuildError
from export_grok.plugins.lowered import NotLowered
from export_grok.plugins.op import DOMAIN
from export_grok.plugins.registry import lowering, specs

__all__ = ["LoweringReport", "lower_ops"]


@dataclass(kw_only=True)
class LoweringReport:
    """What became of the op nodes of a graph, or of several.

    Attributes:
        lowered: nodes replaced by the backend's own, by op type.
        kept: nodes that run by their function body, by op type.
        reasons: why, one line for each kept node.
    """

    lowered: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)

    def add(self, other: "LoweringReport") -> None:
        """Count the nodes of another graph too."""
        self.lowered += other.lowered
        self.kept += other.kept
        self.reasons += other.reasons

    def check(self) -> None:
        """Refuse a graph with kept nodes.

        Raises:
            BuildError: a node was kept; the reasons are named.
        """
        if self.kept:
            raise BuildError(
                f"{self.kept.total()} op nodes could not be lowered and would run by their slow "
                "function body; allow that with --allow-functions.\n  "
                + "\n  ".join(dict.fromkeys(self.reasons))
            )


def lower_ops(model: ir.Model, backend: str) -> LoweringReport:
    """Lower every op node of `model`, in place.

    Args:
        model: a stamped graph.
        backend: whose lowerings to take, e.g. "ort".

    Returns:
        How many of each op were lowered, and why the others were not.
    """
    report = LoweringReport()
    known = specs()
    graph = model.graph
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        rule = lowering(known[node.op_type].name, backend)
        tape = Tape()
        try:
            if rule is None:
                raise NotLowered(f"there is no {backend} lowering of it")
            values = rule.lower(node, graph, tape)
        except NotLowered as reason:
            report.kept[node.op_type] += 1
            report.reasons.append(f"{node.op_type}: {reason}")
            continue
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], tape.nodes, node.outputs, values
        )
        report.lowered[node.op_type] += 1
        _import_domains(model, tape)
    _drop_unused(model)
    NameFixPass()(model)  # the nodes of two branches were named apart from each other
    return report


def _import_domains(model: ir.Model, tape: Tape) -> None:
    for domain, version in tape.used_opsets:
        if domain:
            model.graph.opset_imports[domain] = version or 1
    for node in model.graph.all_nodes():
        if node.domain:
            model.graph.opset_imports.setdefault(node.domain, 1)


def _drop_unused(model: ir.Model) -> None:
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # not typed there
