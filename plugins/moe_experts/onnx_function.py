"""moe_experts as an ONNX function in standard ops: dense over all experts, right, very slow."""

# onnxscript reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors

from onnxscript import FLOAT, INT8, INT64, script, values
from onnxscript.onnx_opset import opset24 as op

from export_grok.plugins.int8_linear.onnx_function import GrokDequantise
from export_grok.plugins.op import DOMAIN, VERSION

__all__ = ["FUNCTIONS", "translate"]

GROK = values.Opset(DOMAIN, VERSION)


@script(GROK, default_opset=op)
def GrokMoeExperts(  # noqa: N802
    x: FLOAT[...],
    gates: FLOAT[...],
    experts: INT64[...],
    gate_weight: INT8[...],
    gate_scales: FLOAT[...],
    up_weight: INT8[...],
    up_scales: FLOAT[...],
    down_weight: INT8[...],
    down_scales: FLOAT[...],
) -> FLOAT[...]:
    last = op.Constant(value_ints=[-1])
    count = op.Shape(gate_weight, start=0, end=1)
    tokens = op.Reshape(op.Cast(x, to=1), op.Concat(last, op.Shape(x, start=-1), axis=0))
    # The weight of each expert for each token, 0 where it was not chosen: [E, n, 1].
    chosen = op.OneHot(experts, op.Squeeze(count), op.Constant(value_floats=[0.0, 1.0]), axis=-1)
    dense = op.ReduceSum(
        op.Mul(chosen, op.Unsqueeze(op.Cast(gates, to=1), last)),
        op.Constant(value_ints=[-2]),
        keepdims=0,
    )
    flat = op.Transpose(op.Reshape(dense, op.Concat(last, count, axis=0)), perm=[1, 0])
    weight_of = op.Unsqueeze(flat, last)

    gate = op.Cast(
        op.CastLike(op.MatMul(tokens, GrokDequantise(gate_weight, gate_scales, x)), x), to=1
    )
    up = op.Cast(op.CastLike(op.MatMul(tokens, GrokDequantise(up_weight, up_scales, x)), x), to=1)
    hidden = op.Mul(op.Gelu(gate, approximate="tanh"), up)
    down = op.MatMul(hidden, GrokDequantise(down_weight, down_scales, x))
    weighted = op.Mul(down, weight_of)
    total = op.ReduceSum(weighted, op.Constant(value_ints=[0]), keepdims=0)
    return op.CastLike(op.Reshape(total, op.Shape(x)), x)


FUNCTIONS = (GrokDequantise, GrokMoeExperts)


def translate(
    x,
    gates,
    experts,
    gate_weight,
    gate_scales,
    up_weight,
    up_scales,
    down_weight,
    down_scales,
):
    """Return the node that torch op `grok1::moe_experts` becomes."""
    return GROK.GrokMoeExperts(
        x,
        gates,
        experts,
        gate_weight,
        gate_scales,
        up_weight,
        up_scales,
        down_weight,
        down_scales,
    )
