"""moe_experts -> an `If` for each expert, which computes its rows only when it has some.

The rows an expert was chosen for are gathered, go through its three matrices as in
`int8_linear.ort_lowering`, and are put where they were chosen; then the choices of each token are
summed, in their order. An expert without rows reads no weights. An `If` for each expert
was the fastest of the forms that were measured: loops, dense, one session per expert.
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
    # A slot is one choice of one token, n * C of them. Every slot is written once: ONNX Runtime
    # adds up what is scattered to one place with several threads, and loses some of it.
    weight_of = tape.op("Reshape", [gates, last_axis])
    numbers = constant(graph, f"experts_{count}", np.arange(count).reshape(-1, 1))
    mask = tape.op("Equal", [tape.op("Reshape", [experts, last_axis]), numbers])  # [E, n * C]
    chosen = tape.op("Shape", [experts], {"start": -1})

    places, outputs = [], []
    for expert in range(count):
        number = constant(graph, f"number_{expert}", np.array(expert, np.int64))
        found = tape.op("NonZero", [tape.op("Gather", [mask, number], {"axis": 0})])
        slots = tape.op("Reshape", [found, last_axis])
        any_slot = tape.op(
            "Greater",
            [tape.op("Size", [slots]), constant(graph, "number_0", np.array(0, np.int64))],
        )
        rows = tape.op("Div", [slots, chosen])
        weight = tape.op("Gather", [weight_of, slots], {"axis": 0})
        branches = {
            "then_branch": _expert(node, graph, expert, tokens, rows, weight),
            "else_branch": _nothing(model, expert),
        }
        output = tape.op("If", [any_slot], branches)
        output.type = ir.TensorType(ir.DataType.FLOAT)
        places.append(slots)
        outputs.append(output)

    place = tape.op("Unsqueeze", [tape.op("Concat", places, {"axis": 0}), last_axis])
    update = tape.op("Concat", outputs, {"axis": 0})
    zeros = tape.op("ConstantOfShape", [tape.op("Shape", [update])])
    by_slot = tape.op("ScatterND", [zeros, place, update])
    shape = tape.op(
        "Concat",
        [tape.op("Shape", [experts]), constant(graph, f"width_{model}", np.array([model]))],
        {"axis": 0},
    )
    before_last = constant(graph, "before_last_axis", np.array([-2]))
    by_token = tape.op("Reshape", [by_slot, shape])  # [B, S, C, M]
    return [tape.op("ReduceSum", [by_token, before_last], {"keepdims": 0})]


def _expert(
    node: ir.Node,
    graph: ir.Graph,
    expert: int,
    tokens: ir.Value,
    rows: ir.Value,
    weight: ir.Value,
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
    y = tape.op("Mul", [matrix(hidden, DOWN, width), tape.op("Unsqueeze", [weight, last_axis])])
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
