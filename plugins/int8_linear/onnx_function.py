"""int8_linear as an ONNX function in standard ops: right on any backend, and slow."""

# onnxscript reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors

from onnxscript import FLOAT, INT8, script, values
from onnxscript.onnx_opset import opset24 as op

from export_grok.plugins.op import DOMAIN, VERSION

__all__ = ["FUNCTIONS", "GrokDequantise", "translate"]

GROK = values.Opset(DOMAIN, VERSION)


@script(GROK, default_opset=op)
def GrokDequantise(weight: INT8[...], scales: FLOAT[...], like: FLOAT[...]) -> FLOAT[...]:  # noqa: N802
    """Return int8 [..., K, N] times scales [..., R, N], rounded as `like` is, in float32."""
    before = op.Constant(value_ints=[-2])
    rows = op.Constant(value_ints=[-1])
    grouped = op.Concat(op.Shape(scales, end=-1), rows, op.Shape(scales, start=-1), axis=0)
    scale = op.Unsqueeze(op.Cast(scales, to=1), before)
    product = op.Mul(op.Reshape(op.Cast(weight, to=1), grouped), scale)
    return op.Cast(op.CastLike(op.Reshape(product, op.Shape(weight)), like), to=1)


@script(GROK, default_opset=op)
def GrokInt8Linear(x: FLOAT[...], weight: INT8[...], scales: FLOAT[...]) -> FLOAT[...]:  # noqa: N802
    return op.CastLike(op.MatMul(op.Cast(x, to=1), GrokDequantise(weight, scales, x)), x)


FUNCTIONS = (GrokDequantise, GrokInt8Linear)  # a function stands behind those it calls


def translate(x, weight, scales):
    """Return the node that torch op `grok1::int8_linear` becomes."""
    return GROK.GrokInt8Linear(x, weight, scales)
