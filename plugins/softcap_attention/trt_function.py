"""The plugin nodes of softcap_attention as ONNX functions, for runtimes without such plugins."""

# onnxscript reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors

from onnxscript import FLOAT, INT64, script, values
from onnxscript.onnx_opset import opset24 as op

from export_grok.plugins.op import DOMAIN, VERSION
from export_grok.plugins.softcap_attention.trt_plugin import PART_STEP

__all__ = ["FUNCTIONS"]

GROK = values.Opset(DOMAIN, VERSION)
NOTHING = float("-inf")


@script(GROK, default_opset=op)
def GrokAttentionSplit(  # noqa: N802
    query: FLOAT[...],
    k_cache: FLOAT[...],
    v_cache: FLOAT[...],
    start: INT64[...],
    parts: int,
    scale: float,
    cap: float,
) -> tuple[FLOAT[...], FLOAT[...]]:
    """Return sums [B, Hkv, P, G, D] and stats [B, Hkv, P, G, 2] of the parts of the caches."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    rest = op.Constant(value_ints=[-1])
    count = op.Reshape(op.Constant(value_int=parts), one)
    step = op.Constant(value_ints=[PART_STEP])
    batch, heads = op.Shape(k_cache, end=1), op.Shape(k_cache, start=1, end=2)
    slots, size = op.Shape(k_cache, start=2, end=3), op.Shape(k_cache, start=3)

    # The last part may end behind the cache: what stands there no row sees.
    share = op.Div(op.Sub(op.Add(slots, count), one), count)
    length = op.Mul(op.Div(op.Sub(op.Add(share, step), one), step), step)
    first_index, next_index = op.Constant(value_int=0), op.Constant(value_int=1)
    slot = op.Range(first_index, op.Squeeze(op.Mul(count, length)), next_index)
    stored = op.Min(slot, op.Sub(slots, one))
    by_part = op.Concat(batch, heads, count, length, size, axis=0)
    keys = op.Reshape(op.Cast(op.Gather(k_cache, stored, axis=2), to=1), by_part)
    values_ = op.Reshape(op.Cast(op.Gather(v_cache, stored, axis=2), to=1), by_part)
    seen = op.LessOrEqual(slot, op.Unsqueeze(start, one))
    column = op.Reshape(seen, op.Concat(zero, one, count, length, one, axis=0))
    visible = op.Transpose(column, perm=[0, 1, 2, 4, 3])

    rows = op.Concat(batch, heads, one, rest, size, axis=0)
    queries = op.Reshape(op.Cast(query, to=1), rows)
    dots = op.MatMul(queries, op.Transpose(keys, perm=[0, 1, 2, 4, 3]))
    bound = op.Constant(value_float=cap)
    scaled = op.Mul(dots, op.Constant(value_float=scale))
    capped = op.Mul(bound, op.Tanh(op.Div(scaled, bound)))
    logits = op.Where(visible, capped, op.Constant(value_float=NOTHING))

    largest = op.ReduceMax(logits, rest, keepdims=1)
    finite = op.Max(largest, op.Constant(value_float=-1e30))  # -inf from -inf is no number
    weights = op.Exp(op.Sub(logits, finite))
    # What was never written may be NaN, and 0 * NaN is NaN: a weight of 0 is not enough.
    written = op.Where(column, values_, op.Constant(value_float=0.0))
    sums = op.MatMul(weights, written)
    stats = op.Concat(largest, op.ReduceSum(weights, rest, keepdims=1), axis=-1)
    return sums, stats


@script(GROK, default_opset=op)
def GrokAttentionCombine(sums: FLOAT[...], stats: FLOAT[...], to: int) -> FLOAT[...]:  # noqa: N802
    """Return the attention [B, 1, Hq*D] of dtype `to` from the sums and stats of all parts."""
    part = op.Constant(value_ints=[2])
    largest = op.Gather(stats, op.Constant(value_ints=[0]), axis=-1)
    totals = op.Gather(stats, op.Constant(value_ints=[1]), axis=-1)
    factors = op.Exp(op.Sub(largest, op.ReduceMax(largest, part, keepdims=1)))
    total = op.ReduceSum(op.Mul(totals, factors), part, keepdims=0)
    mean = op.Div(op.ReduceSum(op.Mul(sums, factors), part, keepdims=0), total)
    return op.Cast(op.Reshape(mean, op.Constant(value_ints=[0, 1, -1])), to=to)


FUNCTIONS = (GrokAttentionSplit, GrokAttentionCombine)
