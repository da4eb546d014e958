"""moe_experts -> plugins that read the chosen experts only, or all experts one after the other.

Many tokens, as in prefill, choose all experts between them. Each expert's matrices are then
written out in turn and multiplied with all tokens by TensorRT; where a token did not choose it,
its weight is 0. That is 4 times the products needed with 2 of 8 experts.
"""

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from export_grok.plugins.int8_linear.trt_lowering import FEW_ROWS, matrix
from export_grok.plugins.lowered import constant, dtype_of, fixed_shape, reshaped
from export_grok.plugins.moe_experts.trt_plugin import down_parts
from export_grok.plugins.plugin_graph import plugin_node

__all__ = ["lower"]

FLOAT = {"to": ir.DataType.FLOAT}


def lower(node: ir.Node, graph: ir.Graph, tape: Tape) -> list[ir.Value]:
    """Put the nodes that compute `node` on the tape; return what stands for its outputs.

    Raises:
        NotLowered: a shape is not fixed.
    """
    x, gates, experts = node.inputs[:3]
    shape = fixed_shape(x)
    n, width = math.prod(shape[:-1]), shape[-1]
    choices = fixed_shape(experts)[-1]
    tokens = reshaped(graph, tape, x, (n, width))
    gates, experts = (reshaped(graph, tape, value, (n, choices)) for value in (gates, experts))
    make = _chosen if n <= FEW_ROWS else _one_by_one
    total = make(node, graph, tape, tokens, gates, experts)
    y = tape.op("Cast", [total], {"to": dtype_of(x)})
    return [reshaped(graph, tape, y, shape)]


def _chosen(
    node: ir.Node,
    graph: ir.Graph,
    tape: Tape,
    tokens: ir.Value,
    gates: ir.Value,
    experts: ir.Value,
) -> ir.Value:
    """Return float32 [n, M]: what each token's experts make of it, summed."""
    gate_and_up, down = node.inputs[3:7], node.inputs[7:9]
    (hidden,) = plugin_node(tape, "GrokMoeGateUp", [tokens, experts, *gate_and_up])
    rows, columns = fixed_shape(down[0])[1:]
    parts = down_parts(rows, columns, math.prod(fixed_shape(node.inputs[2])))
    (partial,) = plugin_node(
        tape, "GrokMoeDown", [hidden, gates, experts, *down], {"parts": parts}
    )
    axes = constant(graph, "parts_and_choices", np.array([0, 2]))
    return tape.op("ReduceSum", [partial, axes], {"keepdims": 0})


def _one_by_one(
    node: ir.Node,
    graph: ir.Graph,
    tape: Tape,
    tokens: ir.Value,
    gates: ir.Value,
    experts: ir.Value,
) -> ir.Value:
    """Return float32 [n, M]: the sum of what every expert makes of all tokens, weighted."""
    x, _, _, gate_weight, gate_scales, up_weight, up_scales, down_weight, down_scales = node.inputs
    dtype = dtype_of(x)
    zero = constant(graph, "zero_weight", np.array(0.0, np.float32))
    last_axis = constant(graph, "last_axis", np.array([-1]))
    weights = tape.op("Cast", [gates], FLOAT)
    total = None
    for expert in range(fixed_shape(gate_weight)[0]):
        gate, up = (
            tape.op(
                "Cast",
                [tape.op("MatMul", [tokens, matrix(tape, w, s, dtype=dtype, expert=expert)])],
                FLOAT,
            )
            for w, s in ((gate_weight, gate_scales), (up_weight, up_scales))
        )
        bent = tape.op("Gelu", [gate], {"approximate": "tanh"})
        hidden = tape.op("Mul", [bent, up])
        # In float32, as in the original, which rounds nothing between the two products; it does
        # round this matrix, which is left exact here.
        last = matrix(tape, down_weight, down_scales, dtype=ir.DataType.FLOAT, expert=expert)
        number = constant(graph, f"expert_{expert}", np.array(expert))
        chosen = tape.op("Where", [tape.op("Equal", [experts, number]), weights, zero])
        weight = tape.op("ReduceSum", [chosen, last_axis], {"keepdims": 1})
        weighted = tape.op("Mul", [tape.op("MatMul", [hidden, last]), weight])
        # What an expert makes of others' tokens may be inf, and 0 * inf is NaN.
        part = tape.op("Where", [tape.op("Equal", [weight, zero]), zero, weighted])
        total = part if total is None else tape.op("Add", [total, part])
    if total is None:
        raise AssertionError("a model has experts")
    return total
