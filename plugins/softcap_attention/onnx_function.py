"""softcap_attention as an ONNX function in standard ops: right on any backend, and slow.

TensorScatter writes the caches in place where the same memory is bound to input and output.
"""

# onnxscript reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors

from onnxscript import FLOAT, INT64, script, values
from onnxscript.onnx_opset import opset24 as op

from export_grok.plugins.op import DOMAIN, VERSION

__all__ = ["FUNCTIONS", "translate"]

GROK = values.Opset(DOMAIN, VERSION)


@script(GROK, default_opset=op)
def GrokSoftcapAttention(  # noqa: N802
    query: FLOAT[...],
    key: FLOAT[...],
    value: FLOAT[...],
    k_cache: FLOAT[...],
    v_cache: FLOAT[...],
    start: INT64[...],
    num_heads: int,
    kv_heads: int,
    scale: float,
    cap: float,
) -> tuple[FLOAT[...], FLOAT[...], FLOAT[...]]:
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    last = op.Constant(value_ints=[-1])
    first_index = op.Constant(value_int=0)
    step = op.Constant(value_int=1)
    q_heads = op.Reshape(op.Constant(value_int=num_heads), one)
    heads = op.Reshape(op.Constant(value_int=kv_heads), one)
    group = op.Div(q_heads, heads)
    batch = op.Shape(query, start=0, end=1)
    tokens = op.Shape(query, start=1, end=2)
    slots = op.Shape(k_cache, start=2, end=3)
    size = op.Shape(k_cache, start=3, end=4)

    by_head = op.Concat(zero, zero, heads, size, axis=0)
    new_keys = op.Transpose(op.Reshape(key, by_head), perm=[0, 2, 1, 3])
    new_values = op.Transpose(op.Reshape(value, by_head), perm=[0, 2, 1, 3])
    k_out = op.TensorScatter(k_cache, new_keys, start, axis=2, mode="linear")
    v_out = op.TensorScatter(v_cache, new_values, start, axis=2, mode="linear")

    # [B, S, Hkv, G, D] -> [B, Hkv, S*G, D]: the queries of one key/value head stand together.
    grouped = op.Reshape(query, op.Concat(zero, zero, heads, group, size, axis=0))
    rows = op.Concat(batch, heads, last, size, axis=0)
    queries = op.Cast(op.Reshape(op.Transpose(grouped, perm=[0, 2, 1, 3, 4]), rows), to=1)
    keys = op.Transpose(op.Cast(k_out, to=1), perm=[0, 1, 3, 2])
    dots = op.Cast(op.CastLike(op.MatMul(queries, keys), query), to=1)
    bound = op.Constant(value_float=cap)
    scaled = op.Mul(dots, op.Constant(value_float=scale))
    capped = op.Mul(bound, op.Tanh(op.Div(scaled, bound)))

    slot = op.Range(first_index, op.Squeeze(slots), step)
    ahead = op.Range(first_index, op.Squeeze(tokens), step)
    position = op.Add(op.Unsqueeze(start, one), ahead)
    by_query = op.Reshape(position, op.Concat(batch, one, tokens, one, one, axis=0))
    visible = op.LessOrEqual(slot, by_query)
    by_token = op.Reshape(capped, op.Concat(batch, heads, tokens, group, slots, axis=0))
    masked = op.Where(visible, by_token, op.Constant(value_float=-1e30))
    softmax = op.Cast(op.CastLike(op.Softmax(masked, axis=-1), query), to=1)
    probabilities = op.Reshape(softmax, op.Concat(batch, heads, last, slots, axis=0))

    # What was never written may be NaN, and 0 * NaN is NaN: a masked probability is not enough.
    end = op.Reshape(op.Add(start, tokens), op.Concat(batch, one, one, one, axis=0))
    written = op.Less(op.Unsqueeze(slot, one), end)
    values_ = op.Where(written, op.Cast(v_out, to=1), op.Constant(value_float=0.0))
    output = op.Reshape(
        op.MatMul(probabilities, values_),
        op.Concat(batch, heads, tokens, group, size, axis=0),
    )
    by_row = op.Transpose(output, perm=[0, 2, 1, 3, 4])
    y = op.CastLike(op.Reshape(by_row, op.Concat(batch, tokens, last, axis=0)), query)
    return y, k_out, v_out


FUNCTIONS = (GrokSoftcapAttention,)


def translate(
    query,
    key,
    value,
    k_cache,
    v_cache,
    start,
    num_heads: int,
    kv_heads: int,
    scale: float,
    cap: float,
):
    """Return the node that torch op `grok1::softcap_attention` becomes."""
    return GROK.GrokSoftcapAttention(
        query,
        key,
        value,
        k_cache,
        v_cache,
        start,
        num_heads=num_heads,
        kv_heads=kv_heads,
        scale=scale,
        cap=cap,
    )
