"""Cut the graph of a rank where ranks are summed: between two parts somebody else takes the sum.

A part's inputs are those of the graph that it uses, `sum` behind a sum, and values of earlier
parts by their names. Its outputs are `partial`, of which the sum is taken behind it, the values
that later parts use, and those of the graph that it makes. Where a sum is the last node there is
no part behind it: the sum is the graph's output.
"""

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from export_grok.errors import BuildError

__all__ = ["PARTIAL", "SUM", "Part", "cut"]

PARTIAL = "partial"
SUM = "sum"

_COLLECTIVES = {("grok1", "GrokAllReduce"), ("trt", "DistCollective")}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank computes without the others.

    Attributes:
        model: a graph of its own.
        summed: its output `partial` is to be summed over the ranks.
    """

    model: ir.Model
    summed: bool


def cut(model: ir.Model) -> list[Part]:
    """Return the parts of a graph, in its order; one if nothing is summed.

    Args:
        model: a template, a stamped graph, or one lowered for TensorRT. It stays as it is. No
            input or output of it is called `partial` or `sum`.

    Raises:
        BuildError: a value that crosses a cut has no type or no shape.
    """
    whole = model.clone()
    graph = whole.graph
    RemoveUnusedNodesPass()(whole)
    _free_names(graph)
    _separate_sums(graph)
    sections, sums = _sections(graph)
    ends_in_sum = bool(sums) and not sections[-1]
    parts = []
    for number, section in enumerate(sections[:-1] if ends_in_sum else sections):
        before = sums[number - 1].outputs[0] if number else None
        behind = sums[number].inputs[0] if number < len(sums) else None
        parts.append(_part(whole, section, before, behind, number))
    return parts


def _sections(graph: ir.Graph) -> tuple[list[list[ir.Node]], list[ir.Node]]:
    """Return the nodes before, between and behind the sums, and the sums."""
    sections: list[list[ir.Node]] = [[]]
    sums = []
    for node in graph:
        if (node.domain, node.op_type) in _COLLECTIVES:
            sums.append(node)
            sections.append([])
        elif not _is_repeated(node):
            sections[-1].append(node)
    return sections, sums


def _is_repeated(node: ir.Node) -> bool:
    """Return whether a node is made again in each part that needs it: a constant."""
    return not node.inputs and not any(value.is_graph_output() for value in node.outputs)


def _free_names(graph: ir.Graph) -> None:
    """Have no value called as the inputs and outputs of parts are to be."""
    for value in ir.convenience.create_value_mapping(graph).values():
        if value.name in (PARTIAL, SUM):
            value.name = f"{value.name}_in_{graph.name}"


def _separate_sums(graph: ir.Graph) -> None:
    """Have what is summed made right before its sum, and a sum used right behind it only."""
    sections, sums = _sections(graph)
    for node, before, behind in zip(sums, sections[:-1], sections[1:], strict=True):
        x, total = node.inputs[0], node.outputs[0]
        assert x is not None
        if x.producer() not in before or not _used_in(x, [*before, node]):
            copy = _copy(x, f"{total.name}_{PARTIAL}")
            graph.insert_before(node, copy)
            node.replace_input_with(0, copy.outputs[0])
        if (behind or node is not sums[-1]) and not _used_in(total, behind):
            copy = _copy(total, f"{total.name}_{SUM}")
            graph.insert_after(node, copy)
            for user, place in list(total.uses()):
                if user is not copy and user not in behind:
                    user.replace_input_with(place, copy.outputs[0])
            for place, output in enumerate(graph.outputs):
                if output is total:
                    graph.outputs[place] = copy.outputs[0]
                    # Its name is the graph's: the sum takes the other.
                    total.name, copy.outputs[0].name = copy.outputs[0].name, total.name


def _used_in(value: ir.Value, nodes: Collection[ir.Node]) -> bool:
    """Return whether nothing but these nodes uses the value."""
    return not value.is_graph_output() and all(user in nodes for user, _ in value.uses())


def _copy(value: ir.Value, name: str) -> ir.Node:
    output = ir.Value(name=name, shape=value.shape, type=value.type)
    return ir.Node("", "Identity", [value], outputs=[output])


def _part(
    whole: ir.Model,
    section: list[ir.Node],
    before: ir.Value | None,
    behind: ir.Value | None,
    number: int,
) -> Part:
    graph = whole.graph
    inside = set(section)
    taken = {value for node in section for value in node.inputs if value is not None}
    made = [value for node in graph if not _is_repeated(node) for value in node.outputs]
    inputs = [value for value in graph.inputs if value in taken]
    inputs += [] if before is None else [before]
    inputs += [
        value
        for value in made
        if value in taken and value.producer() not in inside and value is not before
    ]
    outputs = [] if behind is None else [behind]
    outputs += [
        value
        for value in made
        if value.producer() in inside and value is not behind and not _used_in(value, inside)
    ]
    for value in (*inputs, *outputs):
        if value.shape is None or value.dtype is None:
            raise BuildError(
                f"{graph.name} cannot be cut: {value.name} crosses from part to part, and its "
                "type or shape is not known; infer the shapes of the graph first"
            )
    part = ir.convenience.extract(graph, inputs, outputs)
    part.name = f"{graph.name}_{number}"
    for name in [name for name in graph.initializers if name in part.initializers]:
        part.initializers[name] = part.initializers.pop(name)  # in the order of the graph
    if before is not None:
        part.inputs[inputs.index(before)].name = SUM
    if behind is not None:
        part.outputs[0].name = PARTIAL
    model = ir.Model(
        part,
        ir_version=whole.ir_version,
        producer_name=whole.producer_name,
        producer_version=whole.producer_version,
        functions=[function.clone() for function in whole.functions.values()],
    )
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # not typed there
    return Part(model=model, summed=behind is not None)
