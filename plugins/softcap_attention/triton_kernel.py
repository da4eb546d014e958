"""The decode attention in two kernels: parts of the cache side by side, then their sum.

One program reads one part of one key/value head, for all query heads that share it: keys and
values pass once. Storage is T; products are summed, and all between them is done, in float32:

    x = scale * q . k,    l = cap * tanh(x / cap),    w = exp(l - m),    m = max l of the part

Both products run on tensor cores where T is bfloat16 or float16; there w is rounded to T, as the
original rounds its probabilities (NUMERICS step 9). q . k is not rounded to T, as it is there.
Slots that a row does not see are neither read nor multiplied.
"""

# Triton reads the functions below as a language of its own; they are no typed Python.
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["attention_combine", "attention_split"]


@triton.jit
def attention_split(
    QUERY,  # noqa: N803
    K_CACHE,  # noqa: N803
    V_CACHE,  # noqa: N803
    START,  # noqa: N803
    slots,
    part_slots,
    SUMS,  # noqa: N803
    STATS,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    SCALE: tl.constexpr,  # noqa: N803
    CAP: tl.constexpr,  # noqa: N803
    OPERAND: tl.constexpr,  # noqa: N803
):
    """Sum exp(l - m) times the values over one part of the cache.

    Args:
        QUERY: [B, 1, Hq*D].
        K_CACHE: [B, Hkv, T, D]; the new key is in it.
        V_CACHE: likewise.
        START: [B]; row b sees slots 0 to START[b].
        slots: T.
        part_slots: of each part; the last may have fewer.
        SUMS: [B, Hkv, P, G, D].
        STATS: [B, Hkv, P, G, 2]: m, and the sum of exp(l - m). A part of which a row sees nothing
            has zeros, and -inf and 0.
        GROUP: G.
        SIZE: D.
        ROWS: G, rounded up to what tensor cores multiply.
        WIDTH: D, likewise.
        BLOCK: slots at a time.
        SCALE: factor on the logits.
        CAP: bound of the logits.
        OPERAND: dtype in which both products take their factors.
    """
    operand = getattr(tl, OPERAND)
    head, batch, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, parts = tl.num_programs(0), tl.num_programs(2)
    row = batch * heads + head
    first = part * part_slots
    seen = tl.load(START + batch).to(tl.int32) + 1
    end = tl.minimum(tl.minimum(seen, first + part_slots), slots)

    g = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    in_head = d < SIZE
    in_group = (g < GROUP) & in_head
    query = tl.load(QUERY + (row * GROUP + g) * SIZE + d, mask=in_group, other=0.0).to(operand)
    cache = row.to(tl.int64) * slots * SIZE  # may be beyond 32 bits

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for begin in range(first, end, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        visible = slot < end
        place = cache + slot[:, None] * SIZE + d
        here = visible[:, None] & in_head
        keys = tl.load(K_CACHE + place, mask=here, other=0.0).to(operand)
        values = tl.load(V_CACHE + place, mask=here, other=0.0).to(operand)

        x = tl.dot(query, tl.trans(keys), input_precision="ieee") * (SCALE / CAP)
        e = tl.exp(-2.0 * tl.abs(x))  # 1 at 0, 0 at infinity: tanh is exact at both
        tanh = (1.0 - e) / (1.0 + e)
        logits = CAP * tl.where(x < 0, -tanh, tanh)
        logits = tl.where(visible[None, :], logits, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(logits, 1))  # finite: a block has a visible slot
        shrunk = tl.exp(largest - new_largest)
        weights = tl.exp(logits - new_largest[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None]
        sums += tl.dot(weights.to(operand), values, input_precision="ieee")
        largest = new_largest

    at = (row * parts + part) * GROUP + g
    tl.store(SUMS + at * SIZE + d, sums, mask=in_group)
    tl.store(STATS + at * 2, largest[:, None], mask=g < GROUP)
    tl.store(STATS + at * 2 + 1, total[:, None], mask=g < GROUP)


@triton.jit
def attention_combine(
    SUMS,  # noqa: N803
    STATS,  # noqa: N803
    parts,
    Y,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Add the parts of one query head, each times exp(m - max m), over the sum of all weights.

    Args:
        SUMS: [B, Hkv, P, G, D].
        STATS: [B, Hkv, P, G, 2].
        parts: P.
        Y: [B, 1, Hq*D] T.
        GROUP: G.
        SIZE: D.
        PARTS: P, rounded up to a power of two.
        COLUMNS: of a head that one program adds up.
    """
    row, g = tl.program_id(0), tl.program_id(1)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    here = part < parts
    at = (row * parts + part) * GROUP + g
    largest = tl.load(STATS + at * 2, mask=here, other=float("-inf"))
    total = tl.load(STATS + at * 2 + 1, mask=here, other=0.0)
    in_head = d < SIZE
    place = at[:, None] * SIZE + d[None, :]
    sums = tl.load(SUMS + place, mask=here[:, None] & in_head[None, :], other=0.0)
    factor = tl.exp(largest - tl.max(largest, 0))  # position 0 is seen: the maximum is finite
    y = tl.sum(sums * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(Y + (row * GROUP + g) * SIZE + d, y.to(Y.dtype.element_ty), mask=in_head)
