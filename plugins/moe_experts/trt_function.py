"""The plugin nodes of moe_experts as ONNX functions, for runtimes that have no such plugins."""

# onnxscript reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors

from onnxscript import FLOAT, INT8, INT64, script, values
from onnxscript.onnx_opset import opset24 as op

from export_grok.plugins.int8_linear.trt_function import GrokScaled
from export_grok.plugins.op import DOMAIN, VERSION

__all__ = ["FUNCTIONS"]

GROK = values.Opset(DOMAIN, VERSION)


@script(GROK, default_opset=op)
def GrokMoeGateUp(  # noqa: N802
    x: FLOAT[...],
    experts: INT64[...],
    gate_weight: INT8[...],
    gate_scales: FLOAT[...],
    up_weight: INT8[...],
    up_scales: FLOAT[...],
) -> FLOAT[...]:
    """Return gelu(x @ Wgate) * (x @ Wup) of each chosen expert: float32 [n, C, F]."""
    row = op.Unsqueeze(op.Cast(x, to=1), op.Constant(value_ints=[1, 2]))
    gate_matrix = GrokScaled(op.Gather(gate_weight, experts), op.Gather(gate_scales, experts))
    up_matrix = GrokScaled(op.Gather(up_weight, experts), op.Gather(up_scales, experts))
    gate = op.Cast(op.CastLike(op.MatMul(row, gate_matrix), x), to=1)
    up = op.Cast(op.CastLike(op.MatMul(row, up_matrix), x), to=1)
    hidden = op.Mul(op.Gelu(gate, approximate="tanh"), up)
    return op.Squeeze(hidden, op.Constant(value_ints=[2]))


@script(GROK, default_opset=op)
def GrokMoeDown(  # noqa: N802
    hidden: FLOAT[...],
    gates: FLOAT[...],
    experts: INT64[...],
    down_weight: INT8[...],
    down_scales: FLOAT[...],
    parts: int,
) -> FLOAT[...]:
    """Return gate * (hidden @ Wdown) of each choice as sums over P parts of F: [P, n, C, M]."""
    count = op.Reshape(op.Constant(value_int=parts), op.Constant(value_ints=[1]))
    lead, rest = op.Shape(experts), op.Constant(value_ints=[-1])
    one, width = op.Constant(value_ints=[1]), op.Shape(down_weight, start=-1)
    rows = op.Reshape(hidden, op.Concat(lead, count, one, rest, axis=0))
    chosen = GrokScaled(op.Gather(down_weight, experts), op.Gather(down_scales, experts))
    matrix = op.Reshape(chosen, op.Concat(lead, count, rest, width, axis=0))
    product = op.Squeeze(op.MatMul(rows, matrix), op.Constant(value_ints=[3]))
    weighted = op.Mul(product, op.Unsqueeze(op.Cast(gates, to=1), op.Constant(value_ints=[2, 3])))
    return op.Transpose(weighted, perm=[2, 0, 1, 3])


FUNCTIONS = (GrokScaled, GrokMoeGateUp, GrokMoeDown)
