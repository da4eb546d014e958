"""softcap_attention -> a cache write in place, then two plugins for one token, or plain nodes.

TensorRT's own attention refuses soft-capped logits. One token a row, as in decoding, is bound by
reading the caches: the plugins read of them what a row sees, once. Many tokens, as in prefill, are
standard nodes over all T slots: the logits [B, Hkv, S*G, T] are written out, so a chunk should be
a few hundred tokens.

The caches must be outputs of the graph; TensorRT then writes them where they lie.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from export_grok.plugins.lowered import attribute, constant, dtype_of, fixed_shape, reshaped
from export_grok.plugins.plugin_graph import plugin_node
from export_grok.plugins.softcap_attention.trt_plugin import attention_parts

__all__ = ["lower"]

MASKED = -1e30


def lower(node: ir.Node, graph: ir.Graph, tape: Tape) -> list[ir.Value]:
    """Put the nodes that compute `node` on the tape; return what stands for its outputs.

    Raises:
        NotLowered: a shape is not fixed.
    """
    query, key, value, k_cache, v_cache, start = node.inputs
    k_out, v_out = (
        _written(graph, tape, cache, new, start)
        for cache, new in ((k_cache, key), (v_cache, value))
    )
    if fixed_shape(query)[1] == 1:
        y = _one_token(node, tape, k_out, v_out)
    else:
        y = _many_tokens(node, graph, tape, k_out, v_out)
    return [y, k_out, v_out]


def _written(
    graph: ir.Graph,
    tape: Tape,
    cache: ir.Value | None,
    new: ir.Value | None,
    start: ir.Value | None,
) -> ir.Value:
    """Return the cache [B, Hkv, T, D] with the rows `new` [B, S, Hkv*D] from slot `start` on."""
    _, heads, _, size = fixed_shape(cache)
    batch, tokens, _ = fixed_shape(new)
    by_head = reshaped(graph, tape, new, (batch, tokens, heads, size))
    rows = tape.op("Transpose", [by_head], {"perm": [0, 2, 1, 3]})
    out = tape.op("TensorScatter", [cache, rows, start], {"axis": 2, "mode": "linear"})
    return _like(out, cache)


def _one_token(node: ir.Node, tape: Tape, k_out: ir.Value, v_out: ir.Value) -> ir.Value:
    """Return the attention [B, 1, Hq*D] by the plugins."""
    query, start = node.inputs[0], node.inputs[5]
    batch, heads, slots, _ = fixed_shape(k_out)
    attributes = {
        "parts": attention_parts(slots, batch, heads),
        "scale": attribute(node, "scale"),
        "cap": attribute(node, "cap"),
    }
    inputs = [query, k_out, v_out, start]
    parts = plugin_node(tape, "GrokAttentionSplit", inputs, attributes)
    (y,) = plugin_node(tape, "GrokAttentionCombine", parts, {"to": int(dtype_of(query))})
    return _like(y, query)


def _many_tokens(
    node: ir.Node, graph: ir.Graph, tape: Tape, k_out: ir.Value, v_out: ir.Value
) -> ir.Value:
    """Return the attention [B, S, Hq*D]: both products in T, all between them in float32.

    The queries of one key/value head stand together: row s*G + g of [S*G] is of token s.
    """
    query, start = node.inputs[0], node.inputs[5]
    dtype = {"to": dtype_of(query)}
    batch, tokens, width = fixed_shape(query)
    _, heads, slots, size = fixed_shape(k_out)
    group = width // (heads * size)

    def number(name: str, value: float) -> ir.Value:
        return constant(graph, f"attention_{name}", np.array(value, np.float32))

    grouped = reshaped(graph, tape, query, (batch, tokens, heads, group, size))
    by_head = tape.op("Transpose", [grouped], {"perm": [0, 2, 1, 3, 4]})
    queries = reshaped(graph, tape, by_head, (batch, heads, tokens * group, size))
    keys = tape.op("Transpose", [k_out], {"perm": [0, 1, 3, 2]})
    dots = tape.op("Cast", [tape.op("MatMul", [queries, keys])], {"to": ir.DataType.FLOAT})
    cap = number("cap", attribute(node, "cap"))
    scaled = tape.op("Mul", [dots, number("scale", attribute(node, "scale"))])
    capped = tape.op("Mul", [tape.op("Tanh", [tape.op("Div", [scaled, cap])]), cap])

    slot = _counted(graph, tape, slots)
    each = constant(graph, f"shape_{tokens}_{group}", np.array([tokens, group]))
    by_group = tape.op("Expand", [_column(graph, tape, tokens), each])
    token_of_row = reshaped(graph, tape, by_group, (tokens * group, 1))
    first = reshaped(graph, tape, start, (batch, 1, 1, 1))
    visible = tape.op("LessOrEqual", [slot, tape.op("Add", [first, token_of_row])])
    masked = tape.op("Where", [visible, capped, number("masked", MASKED)])
    probabilities = tape.op("Cast", [tape.op("Softmax", [masked], {"axis": -1})], dtype)

    # What was never written may be NaN, and 0 * NaN is NaN: a masked probability is not enough.
    row = _column(graph, tape, slots)
    end = tape.op("Add", [first, constant(graph, f"tokens_{tokens}", np.array(tokens))])
    zero = tape.op("Cast", [number("zero", 0.0)], dtype)
    values = tape.op("Where", [tape.op("Less", [row, end]), v_out, zero])
    product = tape.op("MatMul", [probabilities, values])
    by_token = reshaped(graph, tape, product, (batch, heads, tokens, group, size))
    back = tape.op("Transpose", [by_token], {"perm": [0, 2, 1, 3, 4]})
    return _like(reshaped(graph, tape, back, (batch, tokens, width)), query)


def _counted(graph: ir.Graph, tape: Tape, end: int) -> ir.Value:
    """Return the numbers 0, 1, ... below `end`; as a constant they would swell the graph."""
    ends = (constant(graph, f"whole_{number}", np.array(number)) for number in (0, end, 1))
    return tape.op("Range", [*ends])


def _column(graph: ir.Graph, tape: Tape, end: int) -> ir.Value:
    """Return the numbers below `end` as [end, 1]."""
    return reshaped(graph, tape, _counted(graph, tape, end), (end, 1))


def _like(value: ir.Value, other: ir.Value | None) -> ir.Value:
    """Give a value the dtype and shape of another: a tape infers neither."""
    value.type, value.shape = ir.TensorType(dtype_of(other)), ir.Shape(fixed_shape(other))
    return value
