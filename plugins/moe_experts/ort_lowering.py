"""moe_experts -> an `If` for each expert, which computes its rows only when it has some.

The rows an expert was chosen for are gathered, go through its three matrices as in
`int8_linear.ort_lowering`, and are added where they came from. An expert without rows reads no
weights. Chosen by measurement among loops, dense forms and one session per expert.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from export_grok.plugins.int8_linear.ort_lowering import product, seven_bit_rows
from export_grok.plugins.lowered import NotLowered, constant, stored_weight

__all__ = ["lower"]

GATE, UP, DOWN = (3, 5, 7)


def lower(node: ir.Node, graph: ir.Graph, tape: Tape) -> list[ir.Value]:
    """Put the nodes that compute `node` on the tape; return what stands for its outputs.

    Raises:
        NotLowered: the weights are not stored, or the graph is not float32.
    """
    x, gates, experts = node.inputs[:3]
    if x is None or x.dtype != ir.DataType.FLOAT:
        raise NotLowered(f"x is {None if x is None else x.dtype}; the kernel takes FLOAT")
    count, model, _ = (int(length) for length in stored_weight(node, GATE).shape.numpy())
    last_axis = constant(graph, "last_axis", np.array([-1]))
    tokens = tape.op("Reshape", [x, constant(graph, "flat_tokens", np.array([-1, model]))])
    rows_of, weight_of = _assignment(tape, graph, gates, experts, count)

    places, outputs = [], []
    for expert in range(count):
        number = constant(graph, f"number_{expert}", np.array(expert, np.int64))
        chosen = tape.op("NonZero", [tape.op("Gather", [rows_of, number], {"axis": 0})])
        rows = tape.op("Reshape", [chosen, last_axis])
        any_row = tape.op(
            "Greater",
            [tape.op("Size", [rows]), constant(graph, "number_0", np.array(0, np.int64))],
        )
        inputs = (tokens, rows, tape.op("Gather", [weight_of, number], {"axis": 0}))
        branches = {
            "then_branch": _expert(node, graph, expert, *inputs),
            "else_branch": _nothing(model, expert),
        }
        output = tape.op("If", [any_row], branches)
        output.type = ir.TensorType(ir.DataType.FLOAT)
        places.append(tape.op("Unsqueeze", [rows, last_axis]))
        outputs.append(output)

    zeros = tape.op("ConstantOfShape", [tape.op("Shape", [tokens])])
    place = tape.op("Concat", places, {"axis": 0})
    update = tape.op("Concat", outputs, {"axis": 0})
    total = tape.op("ScatterND", [zeros, place, update], {"reduction": "add"})
    return [tape.op("Reshape", [total, tape.op("Shape", [x])])]


def _assignment(
    tape: Tape, graph: ir.Graph, gates: ir.Value | None, experts: ir.Value | None, count: int
) -> tuple[ir.Value, ir.Value]:
    """Return which rows each expert has, and the gate of each: int32 and float32 [E, n]."""
    numbers = constant(graph, f"experts_{count}", np.arange(count).reshape(-1, 1, 1, 1))
    mask = tape.op("Equal", [experts, numbers])  # [E, B, S, C]
    flat = constant(graph, f"by_expert_{count}", np.array([count, -1]))
    last_axis = constant(graph, "last_axis", np.array([-1]))
    no_keep = {"keepdims": 0}
    hits = tape.op("Cast", [mask], {"to": ir.DataType.INT32})
    rows_of = tape.op("ReduceMax", [hits, last_axis], no_keep)
    weighted = tape.op("Mul", [tape.op("Cast", [mask], {"to": ir.DataType.FLOAT}), gates])
    weight_of = tape.op("ReduceSum", [weighted, last_axis], no_keep)
    return tape.op("Reshape", [rows_of, flat]), tape.op("Reshape", [weight_of, flat])


def _expert(
    node: ir.Node,
    graph: ir.Graph,
    expert: int,
    tokens: ir.Value,
    rows: ir.Value,
    weight_of: ir.Value,
) -> ir.Graph:
    """Return the branch that computes one expert's rows, times their gates."""
    tape = Tape()
    weights = {index: stored_weight(node, index) for index in (GATE, UP, DOWN)}
    scales = {index: stored_weight(node, index + 1) for index in (GATE, UP, DOWN)}
    _, model, width = (int(length) for length in weights[GATE].shape.numpy())

    def matrix(x: ir.Value, index: int, height: int) -> ir.Value:
        groups = int(scales[index].shape.numpy()[1])
        terms = seven_bit_rows(tape, graph, x, height, groups=groups)
        return product(tape, graph, terms, weights[index], scales[index], index=(expert,))

    x = tape.op("Gather", [tokens, rows], {"axis": 0})
    gate = tape.op("Gelu", [matrix(x, GATE, model)], {"approximate": "tanh"})
    hidden = tape.op("Mul", [gate, matrix(x, UP, model)])
    last_axis = constant(graph, "last_axis", np.array([-1]))
    weight = tape.op("Unsqueeze", [tape.op("Gather", [weight_of, rows], {"axis": 0}), last_axis])
    y = tape.op("Mul", [matrix(hidden, DOWN, width), weight])
    y.type = ir.TensorType(ir.DataType.FLOAT)
    return _branch(tape, y, f"expert_{expert}")


def _nothing(model: int, expert: int) -> ir.Graph:
    tape = Tape()
    empty = ir.tensor(np.zeros((0, model), np.float32))
    y = tape.op("Constant", [], {"value": empty})
    y.type = ir.TensorType(ir.DataType.FLOAT)
    return _branch(tape, y, f"no_rows_{expert}")


def _branch(tape: Tape, y: ir.Value, name: str) -> ir.Graph:
    # A branch must not use a name of the graph around it, not even one that comes later there.
    for number, node in enumerate(tape.nodes):
        for output in node.outputs:
            output.name = f"{name}.{number}"
    return ir.Graph([], [y], nodes=tape.nodes, name=name)
