"""int8_linear -> a plugin that multiplies few rows, or one that makes the matrix for many.

Few rows, as in decoding, are bound by reading the matrix: it is read as int8, once. Its parts are
summed by a standard node, which TensorRT can fuse with what follows. Of many rows, as in prefill,
the product is TensorRT's own.
"""

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from export_grok.plugins.int8_linear.trt_plugin import product_parts
from export_grok.plugins.lowered import constant, dtype_of, fixed_shape, reshaped
from export_grok.plugins.plugin_graph import plugin_node

__all__ = ["FEW_ROWS", "lower", "matrix"]

# Above it the product costs more than reading the matrix, so the matrix may be written out.
FEW_ROWS = 64


def lower(node: ir.Node, graph: ir.Graph, tape: Tape) -> list[ir.Value]:
    """Put the nodes that compute `node` on the tape; return what stands for its outputs.

    Raises:
        NotLowered: a shape is not fixed.
    """
    x, weight, scales = node.inputs
    lead, (rows, columns) = fixed_shape(x)[:-1], fixed_shape(weight)
    n = math.prod(lead)
    if n > FEW_ROWS:
        return [tape.op("MatMul", [x, matrix(tape, weight, scales, dtype=dtype_of(x))])]
    flat = reshaped(graph, tape, x, (n, rows))
    parts = product_parts(rows, columns, n)
    (partial,) = plugin_node(tape, "GrokInt8Product", [flat, weight, scales], {"parts": parts})
    first_axis = constant(graph, "first_axis", np.array([0]))
    total = tape.op("ReduceSum", [partial, first_axis], {"keepdims": 0})
    y = tape.op("Cast", [total], {"to": dtype_of(x)})
    return [reshaped(graph, tape, y, (*lead, columns))]


def matrix(
    tape: Tape,
    weight: ir.Value | None,
    scales: ir.Value | None,
    *,
    dtype: ir.DataType,
    expert: int = 0,
) -> ir.Value:
    """Return the matrix [K, N] in `dtype`, of one expert or the only one."""
    attributes: dict[str, int | float] = {"expert": expert, "to": int(dtype)}
    (made,) = plugin_node(tape, "GrokInt8Matrix", [weight, scales], attributes)
    return made
