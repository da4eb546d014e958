"""int8_linear -> com.microsoft::MatMulIntegerToFloat, with activations as three 7-bit terms.

ONNX Runtime has no kernel for float32 times int8. A row x of activations, cut like the matrix into
its R groups of columns, is written as

    x = m / 63 * (a + b / 126 + c / 126^2),    m = max |x| of the group,   |a|, |b|, |c| <= 63

with whole a, b, c; each is a row of one integer product, so the weights are read once. Seven bits,
not eight: u8 x s8 products are summed in pairs in 16 bits on AVX2, and 2 * 127 * 128 fits. Three
terms, not two: what is left out is below 5e-7 of m, an outlier in one channel included.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from export_grok.plugins.lowered import NotLowered, constant, slice_weight, stored_weight

__all__ = ["SevenBitRows", "lower", "product", "seven_bit_rows"]

TERMS = 3
TOP = 63.0
STEP = 126.0
MICROSOFT = "com.microsoft"


class SevenBitRows:
    """Rows of activations as 7-bit terms.

    Attributes:
        codes: for each group, uint8 [TERMS * n, K / R] with zero point 64.
        factors: for each group, float32 [TERMS, n, 1]: what its part of the product is times.
    """

    def __init__(self, codes: list[ir.Value], factors: list[ir.Value]) -> None:
        self.codes = codes
        self.factors = factors


def lower(node: ir.Node, graph: ir.Graph, tape: Tape) -> list[ir.Value]:
    """Put the nodes that compute `node` on the tape; return what stands for its outputs.

    Raises:
        NotLowered: the weights are not stored, or the graph is not float32.
    """
    x = node.inputs[0]
    weight, scales = stored_weight(node, 1), stored_weight(node, 2)
    if x is None or x.dtype != ir.DataType.FLOAT:
        raise NotLowered(f"x is {None if x is None else x.dtype}; the kernel takes FLOAT")
    rows, columns = (int(length) for length in weight.shape.numpy())
    last = constant(graph, f"flat_{rows}", np.array([-1, rows], np.int64))
    flat = tape.op("Reshape", [x, last])
    terms = seven_bit_rows(tape, graph, flat, rows, groups=int(scales.shape.numpy()[0]))
    y = product(tape, graph, terms, weight, scales)
    lead = tape.op("Shape", [x], {"start": 0, "end": -1})
    width = constant(graph, f"width_{columns}", np.array([columns], np.int64))
    return [tape.op("Reshape", [y, tape.op("Concat", [lead, width], {"axis": 0})])]


def seven_bit_rows(
    tape: Tape, graph: ir.Graph, x: ir.Value, rows: int, *, groups: int
) -> SevenBitRows:
    """Return x [n, K] in 7-bit terms, with a range of its own for each of `groups` blocks of K."""
    shape = constant(graph, f"groups_{groups}_{rows}", np.array([-1, groups, rows // groups]))
    last_axis = constant(graph, "last_axis", np.array([-1]))
    top, step = (
        constant(graph, name, np.array(value, np.float32))
        for name, value in (("top", TOP), ("step", STEP))
    )
    tiny = constant(graph, "tiny", np.array(1e-30, np.float32))
    grouped = tape.op("Reshape", [x, shape])
    largest = tape.op("ReduceMax", [tape.op("Abs", [grouped]), last_axis], {"keepdims": 1})
    largest = tape.op("Max", [largest, tiny])  # a row of zeros stays zeros

    rest = tape.op("Mul", [tape.op("Div", [grouped, largest]), top])
    terms = []
    for term in range(TERMS):
        terms.append(tape.op("Round", [rest]))
        if term < TERMS - 1:
            rest = tape.op("Mul", [tape.op("Sub", [rest, terms[-1]]), step])
    zero = constant(graph, "zero_point_float", np.array(64.0, np.float32))
    stacked = tape.op("Add", [tape.op("Concat", terms, {"axis": 0}), zero])
    codes = tape.op("Cast", [stacked], {"to": ir.DataType.UINT8})  # [TERMS * n, R, K / R]

    units = np.array([1 / TOP / STEP**term for term in range(TERMS)], np.float32)
    unit = constant(graph, "term_units", units.reshape(TERMS, 1, 1, 1))
    factors = tape.op("Mul", [largest, unit])  # [TERMS, n, R, 1]
    numbers = [constant(graph, f"number_{g}", np.array(g, np.int64)) for g in range(groups)]
    return SevenBitRows(
        codes=[tape.op("Gather", [codes, g], {"axis": 1}) for g in numbers],
        factors=[tape.op("Gather", [factors, g], {"axis": 2}) for g in numbers],
    )


def product(
    tape: Tape,
    graph: ir.Graph,
    x: SevenBitRows,
    weight: ir.ExternalTensor,
    scales: ir.ExternalTensor,
    *,
    index: tuple[int, ...] = (),
) -> ir.Value:
    """Return x [n, K] times the matrix, or times the one at `index` of the leading axes: [n, N].

    Each group of rows is a 2-D product of its own: its bytes are contiguous, and ONNX Runtime
    packs 2-D matrices only.
    """
    rows, columns = (int(length) for length in weight.shape.numpy()[len(index) :])
    groups = len(x.codes)
    height = rows // groups
    one = constant(graph, "one", np.array(1.0, np.float32))
    zero_point = constant(graph, "zero_point", np.array(64, np.uint8))
    by_term = constant(graph, f"by_term_{columns}", np.array([TERMS, -1, columns]))
    parts = []
    for group in range(groups):
        matrix = slice_weight(
            graph, weight, index=index, rows=(group * height, (group + 1) * height)
        )
        stored = slice_weight(graph, scales, index=(*index, group))
        scale = tape.op("Cast", [stored], {"to": ir.DataType.FLOAT})
        integer = tape.op(
            "MatMulIntegerToFloat",
            [x.codes[group], matrix, one, scale, zero_point],
            domain=MICROSOFT,
        )
        by_row = tape.op("Reshape", [integer, by_term])
        parts.append(tape.op("Mul", [by_row, x.factors[group]]))
    total = parts[0] if groups == 1 else tape.op("Sum", parts)
    first_axis = constant(graph, "first_axis", np.array([0]))
    return tape.op("ReduceSum", [total, first_axis], {"keepdims": 0})
