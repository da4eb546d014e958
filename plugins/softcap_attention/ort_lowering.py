"""softcap_attention -> com.microsoft::GroupQueryAttention, which writes its caches in place.

In place needs one memory bound to `past_key` and `present_key`, and to the values likewise.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from export_grok.plugins.lowered import NotLowered, attribute, constant

__all__ = ["lower"]


def lower(node: ir.Node, graph: ir.Graph, tape: Tape) -> list[ir.Value]:
    """Put the nodes that compute `node` on the tape; return what stands for its outputs.

    Raises:
        NotLowered: the graph is not float32, or the head size is no multiple of 8.
    """
    query, key, value, k_cache, v_cache, start = node.inputs
    if query is None or query.dtype != ir.DataType.FLOAT:
        raise NotLowered(f"query is {None if query is None else query.dtype}, must be FLOAT")
    head_size = None if k_cache is None or k_cache.shape is None else k_cache.shape[3]
    if not isinstance(head_size, int) or head_size % 8:
        raise NotLowered(f"head_size is {head_size}; the kernel takes a multiple of 8")
    int32 = {"to": ir.DataType.INT32}
    tokens = tape.op("Shape", [query], {"start": 1, "end": 2})
    one = constant(graph, "one_token", np.array([1], np.int64))
    # seqlens_k is the position of the last token; every row has S new ones. Saying so
    # (query_seqlens) lets rows of one batch continue at different positions.
    last = tape.op("Sub", [tape.op("Add", [start, tokens]), one])
    longest = tape.op("Add", [tape.op("ReduceMax", [last], {"keepdims": 0}), one])
    scalar = tape.op("Squeeze", [longest])
    each = tape.op("Expand", [tokens, tape.op("Shape", [start])])
    inputs = [
        query,
        key,
        value,
        k_cache,
        v_cache,
        tape.op("Cast", [last], int32),
        tape.op("Cast", [scalar], int32),
        *[None] * 9,  # rotary tables, bias, sink, quantised cache, norms: not used
        tape.op("Cast", [each], int32),
    ]
    outputs = tape.op_multi_out(
        "GroupQueryAttention",
        inputs,
        {
            "num_heads": attribute(node, "num_heads"),
            "kv_num_heads": attribute(node, "kv_heads"),
            "scale": attribute(node, "scale"),
            "softcap": attribute(node, "cap"),
        },
        num_outputs=3,
        domain="com.microsoft",
    )
    return list(outputs)
