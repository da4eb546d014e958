"""Edit a stamped graph: nodes are found by what they are for, and put in beside others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export_grok.errors import BuildError
from export_grok.plugins.lowered import constant
from export_grok.plugins.op import DOMAIN

__all__ = [
    "inserted",
    "multiplier_changed",
    "node_of",
    "norm_of",
    "numbers",
    "only",
    "replaced",
    "wrong_bodies",
]

# Ops of this domain have no kernels anywhere, so they run by their function bodies.
FAULT_DOMAIN = "grok1.fault"


def only(nodes: Sequence[ir.Node], what: str) -> ir.Node:
    """Return the one node of these.

    Raises:
        BuildError: there is none, or there are several.
    """
    if len(nodes) != 1:
        raise BuildError(
            f"the graph has {len(nodes)} nodes where one was looked for, {what}: it is none of "
            "this program's, so build the bundle again"
        )
    return nodes[0]


def node_of(model: ir.Model, op_type: str, weight: str | None = None) -> ir.Node:
    """Return the one node of a type, or the one of those that takes this weight.

    Raises:
        BuildError: there is none, or there are several.
    """
    found = [
        node
        for node in model.graph
        if node.op_type == op_type
        and (weight is None or weight in [value.name for value in node.inputs if value])
    ]
    return only(found, f"{op_type} of {weight}" if weight else op_type)


def norm_of(model: ir.Model, name: str) -> ir.Node:
    """Return the norm of this name, e.g. "post_attn_norm"."""
    return node_of(model, "RMSNormalization", f"{name}.scale")


def numbers(model: ir.Model, name: str, values: Any, dtype: Any = np.float32) -> ir.Value:
    """Return an initialiser with these numbers."""
    array: NDArray[Any] = np.array(values, dtype)
    return constant(model.graph, f"fault.{name}", array)


def inserted(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, Any] | None = None,
    *,
    like: ir.Value | None,
) -> ir.Value:
    """Put a node before another and return its output.

    Args:
        node: the other.
        op_type: of the new one.
        inputs: of the new one.
        attributes: of the new one.
        like: whose dtype and shape the output has; lowerings and taps ask for them.
    """
    new = ir.node(op_type, inputs, attributes)
    output = new.outputs[0]
    if like is not None:
        output.type, output.shape = like.type, like.shape
    owner = node.graph
    if owner is None:
        raise AssertionError("a node that was found is of a graph")
    owner.insert_before(node, new)
    return output


def replaced(model: ir.Model, node: ir.Node, value: ir.Value) -> None:
    """Have a value stand for the one output of a node, and take the node away."""
    output = node.outputs[0]
    same = ir.node("Identity", [value])
    same.outputs[0].type, same.outputs[0].shape = output.type, output.shape
    ir.convenience.replace_nodes_and_values(
        model.graph, node, [node], [same], [output], [same.outputs[0]]
    )


def multiplier_changed(model: ir.Model, output: str, multiplier: float) -> None:
    """Have the last multiplication before an output of the graph be by another number."""
    (value,) = [value for value in model.graph.outputs if value.name == output]
    node = value.producer()
    while node is not None and node.op_type != "Mul":
        before = node.inputs[0]
        node = None if before is None else before.producer()
    found = only([] if node is None else [node], f"Mul that ends in {output}")
    for index, factor in enumerate(found.inputs):
        if factor is not None and factor.const_value is not None:
            dtype = factor.const_value.dtype.numpy()
            found.replace_input_with(index, numbers(model, "multiplier", multiplier, dtype))


def wrong_bodies(model: ir.Model, *nodes: ir.Node) -> dict[str, ir.Function]:
    """Have nodes run by copies of their function bodies, and return these to be made wrong.

    Returns:
        The copies by op type, with those of the functions that they call.
    """
    copies = {}
    for function in list(model.functions.values()):
        copy = function.clone()
        copy.domain = FAULT_DOMAIN
        for inner in copy:
            if inner.domain == DOMAIN:
                inner.domain = FAULT_DOMAIN
        copy.opset_imports[FAULT_DOMAIN] = 1
        model.functions[copy.identifier()] = copy
        copies[copy.name] = copy
    for node in nodes:
        node.domain = FAULT_DOMAIN
    model.graph.opset_imports[FAULT_DOMAIN] = 1
    return copies
