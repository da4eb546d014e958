"""The formula of softcap_attention in PyTorch; the functional form is `grok1::softcap_attention`.

    cache[b, :, start[b] + s] = new[b, s]
    x = round_T(query . cached key) * scale
    p = softmax(cap * tanh(x / cap), masked to key positions <= start[b] + s)
    y = round_T(round_T(p) . cached value)

T is the dtype of the query; products, sums and everything between the roundings are float32
(NUMERICS steps 8 and 9). The mask knows positions only: a slot beyond them may hold anything, as a
used cache does. Token id 0 is a token like others, where the original masks it as padding.
"""

import torch
from torch import Tensor

__all__ = ["attend", "soft_cap", "softcap_attention", "softcap_attention_", "visible_keys"]

MASKED = -1e30


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return logits bent into (-cap, cap)."""
    return cap * torch.tanh(logits / cap)


def visible_keys(start: Tensor, queries: int, keys: int) -> Tensor:
    """Return which of `keys` slots each query sees: bool [B, S, T], from start [B]."""
    query_position = start[:, None] + torch.arange(queries)
    return torch.arange(keys) <= query_position[:, :, None]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float, cap: float
) -> Tensor:
    """Return the attention of query [B, S, Hkv, G, D] over keys, values [B, Hkv, T, D]: as query.

    Query head h reads key/value head h // G.
    """
    dtype = query.dtype
    slots, tokens = keys.shape[2], query.shape[1]
    written = torch.arange(slots) < (start + tokens)[:, None]
    # What was never written may be NaN, and 0 * NaN is NaN: a masked probability is not enough.
    values = values.float().masked_fill(~written[:, None, :, None], 0.0)
    dots = torch.einsum("bskgd,bktd->bkgst", query.float(), keys.float()).to(dtype).float()
    logits = soft_cap(dots * scale, cap)
    visible = visible_keys(start, tokens, slots)
    logits = logits.masked_fill(~visible[:, None, None], MASKED)
    probabilities = torch.softmax(logits, dim=-1).to(dtype).float()
    return torch.einsum("bkgst,bktd->bskgd", probabilities, values).to(dtype)


def softcap_attention_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    num_heads: int,
    kv_heads: int,
    scale: float,
    cap: float,
) -> Tensor:
    """Return the attention output [B, S, Hq*D]; `k_cache` and `v_cache` are written in place.

    Args:
        query: [B, S, Hq*D], after rotary embedding.
        key: new keys [B, S, Hkv*D], after rotary embedding.
        value: new values [B, S, Hkv*D].
        k_cache: keys [B, Hkv, T, D]; slot p holds position p.
        v_cache: values, likewise.
        start: tokens of each row that the cache holds already [B], int64; start + S <= T.
        num_heads: Hq.
        kv_heads: Hkv.
        scale: factor on the logits.
        cap: bound of the logits.
    """
    rows, tokens, _ = query.shape
    position = start[:, None] + torch.arange(tokens)
    row = torch.arange(rows)[:, None]
    by_head = (rows, tokens, kv_heads, -1)
    k_cache[row, :, position] = key.reshape(by_head).to(k_cache.dtype)
    v_cache[row, :, position] = value.reshape(by_head).to(v_cache.dtype)
    live = int(start.max()) + tokens
    grouped = query.reshape(rows, tokens, kv_heads, num_heads // kv_heads, -1)
    keys, values = k_cache[:, :, :live], v_cache[:, :, :live]
    return attend(grouped, keys, values, start, scale, cap).flatten(2)


@torch.library.custom_op("grok1::softcap_attention", mutates_args=())
def softcap_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    num_heads: int,
    kv_heads: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention output and both caches after the write; nothing is written in place.

    This is the form that torch.export keeps as one node. Arguments as in `softcap_attention_`.
    """
    k_out, v_out = k_cache.clone(), v_cache.clone()
    y = softcap_attention_(query, key, value, k_out, v_out, start, num_heads, kv_heads, scale, cap)
    return y, k_out, v_out


@softcap_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, *_rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(k_cache), torch.empty_like(v_cache)
