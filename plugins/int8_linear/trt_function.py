"""The plugin nodes of int8_linear as ONNX functions, for runtimes that have no such plugins."""

# onnxscript reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors

from onnxscript import FLOAT, INT8, script, values
from onnxscript.onnx_opset import opset24 as op

from export_grok.plugins.op import DOMAIN, VERSION

__all__ = ["FUNCTIONS", "GrokScaled"]

GROK = values.Opset(DOMAIN, VERSION)


@script(GROK, default_opset=op)
def GrokScaled(weight: INT8[...], scales: FLOAT[...]) -> FLOAT[...]:  # noqa: N802
    """Return int8 [..., K, N] times scales [..., R, N], in float32."""
    rows = op.Constant(value_ints=[-1])
    grouped = op.Concat(op.Shape(scales, end=-1), rows, op.Shape(scales, start=-1), axis=0)
    scale = op.Unsqueeze(op.Cast(scales, to=1), op.Constant(value_ints=[-2]))
    product = op.Mul(op.Reshape(op.Cast(weight, to=1), grouped), scale)
    return op.Reshape(product, op.Shape(weight))


@script(GROK, default_opset=op)
def GrokInt8Product(  # noqa: N802
    x: FLOAT[...], weight: INT8[...], scales: FLOAT[...], parts: int
) -> FLOAT[...]:
    """Return x [n, K] @ W [K, N] as sums over P parts of K: float32 [P, n, N]."""
    count = op.Reshape(op.Constant(value_int=parts), op.Constant(value_ints=[1]))
    rest = op.Constant(value_ints=[-1])
    n, columns = op.Shape(x, end=1), op.Shape(weight, start=1)
    rows = op.Reshape(op.Cast(x, to=1), op.Concat(n, count, rest, axis=0))
    matrix = op.Reshape(GrokScaled(weight, scales), op.Concat(count, rest, columns, axis=0))
    return op.MatMul(op.Transpose(rows, perm=[1, 0, 2]), matrix)


@script(GROK, default_opset=op)
def GrokInt8Matrix(  # noqa: N802
    weight: INT8[...], scales: FLOAT[...], expert: int, to: int
) -> FLOAT[...]:
    """Return the matrix of one expert, or the only one, as [K, N] of dtype `to`."""
    first = op.Constant(value_ints=[-1])
    weights = op.Reshape(weight, op.Concat(first, op.Shape(weight, start=-2), axis=0))
    factors = op.Reshape(scales, op.Concat(first, op.Shape(scales, start=-2), axis=0))
    number = op.Constant(value_int=expert)
    scaled = GrokScaled(op.Gather(weights, number, axis=0), op.Gather(factors, number, axis=0))
    return op.Cast(scaled, to=to)


FUNCTIONS = (GrokScaled, GrokInt8Product, GrokInt8Matrix)
