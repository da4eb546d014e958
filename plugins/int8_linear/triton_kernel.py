"""int8_linear in Triton: few rows of activations times an int8 matrix, and the matrix itself.

Decoding reads every byte of a matrix once for a handful of tokens, so what counts is how many
bytes are on their way, and how few instructions each costs. A program owns WIDTH columns of some
rows of the matrix, and multiplies them in one of two ways:

* One or two tokens: in float32. A thread has 16 neighbouring columns, a load of 16 bytes, of each
  row; AHEAD tiles are on their way while as many are multiplied. Threads meet once, at the end.
* More tokens: on tensor cores, from tiles that are copied to shared memory ahead of their use.
  Four neighbouring columns are read as one 32-bit word and become four products: read as bytes,
  each would take a load of its own from shared memory.

int8 is exact in float32, bfloat16 and float16, and all sums are float32. Activations in float32 go
to tensor cores as TERMS numbers of bfloat16 that add up to them: two leave out at most 2^-17 of a
number, three nothing. The scale of a group multiplies the sum over its rows, so the matrix is not
rounded to T, as the original rounds it (NUMERICS step 5).

All of this was chosen by what the compiler makes of it; no GPU has run it yet.
"""

# Triton reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors
# ruff: noqa: N803, RUF005 - upper case is what a kernel is compiled for; (*a, b) is no Triton

import triton
import triton.language as tl

__all__ = ["float32_from_byte", "int8_matrix", "int8_product", "rows_times_matrix"]


@triton.jit
def int8_product(
    x, weight, scales,
    tokens, rows, columns, groups,
    partial,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    TERMS: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write x [n, K] @ W [K, N] as sums over parts of K: [P, n, N].

    Programs: blocks of tokens, which share what they read; blocks of columns; parts.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    left = tl.program_id(1) * WIDTH
    part = tl.program_id(2)
    height = rows // tl.num_programs(2)
    present = token < tokens
    sums = rows_times_matrix(
        x, token * rows, present, weight, scales, left, part * height, part * height + height,
        rows, columns, groups, TOKENS, WIDTH, DEPTH, AHEAD, TERMS, PACKED, ALIGNED,
    )  # fmt: skip
    column = left + tl.arange(0, WIDTH)
    place = (part * tokens + token)[:, None] * columns + column[None, :]
    tl.store(partial + place, sums, mask=present[:, None] & (column < columns)[None, :])


@triton.jit
def int8_matrix(
    weight, scales,
    expert, rows, columns, groups,
    matrix,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the matrix of one expert, [K, N], rounded once to the dtype of `matrix`.

    Programs: blocks of columns; blocks of TILES * DEPTH rows.
    """
    weight += expert.to(tl.int64) * rows * columns
    scales += expert.to(tl.int64) * groups * columns
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    lane = tl.arange(0, DEPTH)
    tile = lane[:, None] * columns + column[None, :]
    height = rows // groups
    first = tl.program_id(1) * (TILES * DEPTH)
    last = tl.minimum(first + TILES * DEPTH, rows)
    for group in range(first // height, tl.cdiv(last, height)):
        scale = tl.load(scales + group * columns + column, mask=inside, other=0.0)
        end = tl.minimum(last, (group + 1) * height)
        for row in range(tl.maximum(first, group * height), end, DEPTH):
            begin = row * columns.to(tl.int64)
            mask = (lane < end - row)[:, None] & inside[None, :]
            number = tl.load(weight + begin + tile, mask=mask, other=0)
            value = float32_from_byte(number.to(tl.int32)) * scale.to(tl.float32)[None, :]
            tl.store(matrix + begin + tile, value.to(matrix.dtype.element_ty), mask=mask)


@triton.jit
def float32_from_byte(word):
    """Return the int8 numbers that are the low bytes of int32 words, in float32.

    A float32 from 2^23 to 2^24 ends in the bits of a whole number: an exclusive or and a
    subtraction. The instruction that converts integers is slower than memory delivers them.
    """
    bits = (word & 0xFF) ^ 0x4B000080  # of 2^23 + 128 + number
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def rows_times_matrix(
    x, start, present, weight, scales, left, first, last, rows, columns, groups,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    TERMS: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return the product of rows of x with a part of a matrix, float32 [TOKENS, WIDTH].

    Args:
        x: activations, of any float dtype.
        start: where in x each row begins, [TOKENS].
        present: whether it is there at all, [TOKENS].
        weight: int8 [K, N].
        scales: [R, N].
        left: the first column.
        first: the first row of the matrix that is taken.
        last: the row behind the last.
        rows: K.
        columns: N.
        groups: R.
        TOKENS: a power of two; on tensor cores at least 16.
        WIDTH: columns, a power of two.
        DEPTH: rows of a tile, a power of two. In float32, so many that each thread has 16 columns.
        AHEAD: tiles, in float32.
        TERMS: numbers that stand for an activation on tensor cores, 1 if it is float16 or
            bfloat16 itself; of several none may be infinite. 0 is float32.
        PACKED: columns that are read at once, on tensor cores: 4 where that divides N, else 1.
        ALIGNED: K, and the rows of parts and of groups, are divisible by 16.
    """
    # PACKED products of columns that lie as far apart as there are; one in float32.
    column = left + tl.arange(0, WIDTH // PACKED) * PACKED
    height = rows // groups
    totals = _zeros(TOKENS, WIDTH, PACKED)
    for group in range(first // height, tl.cdiv(last, height)):
        begin = tl.maximum(first, group * height)
        end = tl.minimum(last, (group + 1) * height)
        if ALIGNED:
            begin = tl.multiple_of(begin, 16)
            end = tl.multiple_of(end, 16)
        if TERMS == 0:
            sums = _in_float32(
                x, start, present, weight, left, begin, end, columns, TOKENS, WIDTH, DEPTH, AHEAD
            )
        else:
            sums = _on_tensor_cores(
                x, start, present, weight, left, begin, end, columns, TOKENS, WIDTH, DEPTH, TERMS,
                PACKED,
            )  # fmt: skip
        place = scales + group * columns + column
        added = ()
        for step in tl.static_range(PACKED):
            scale = tl.load(place + step, mask=column < columns, other=0.0).to(tl.float32)
            added = added + (totals[step] + sums[step] * scale[None, :],)
        totals = added
    if PACKED == 4:
        even, odd = tl.interleave(totals[0], totals[2]), tl.interleave(totals[1], totals[3])
        total = tl.interleave(even, odd)
    else:
        total = totals[0]
    return total


@triton.jit
def _zeros(TOKENS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(PACKED):
        zeros = zeros + (tl.zeros((TOKENS, WIDTH // PACKED), tl.float32),)
    return zeros


@triton.jit
def _in_float32(
    x, start, present, weight, left, begin, end, columns,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, DEPTH)
    column = left + tl.arange(0, WIDTH)
    # Three axes from the first load on: the threads that load a tile keep it.
    tile = (lane[:, None] * columns + column[None, :])[None]
    inside = (column < columns)[None, None, :]
    sums = tl.zeros((TOKENS, DEPTH, WIDTH), tl.float32)
    ahead = _tiles(weight, begin, end, columns, tile, inside, lane, DEPTH, AHEAD)
    for row in range(begin, end, DEPTH * AHEAD):
        tiles = ahead
        following = row + DEPTH * AHEAD
        ahead = _tiles(weight, following, end, columns, tile, inside, lane, DEPTH, AHEAD)
        for step in tl.static_range(AHEAD):
            first = row + step * DEPTH
            mask = present[:, None, None] & (lane < end - first)[None, :, None]
            place = start[:, None, None] + lane[None, :, None]
            activation = tl.load(x + first + place, mask=mask, other=0.0).to(tl.float32)
            sums = tl.fma(activation, float32_from_byte(tiles[step].to(tl.int32)), sums)
    return (tl.sum(sums, 1),)


@triton.jit
def _tiles(
    weight, row, end, columns, tile, inside, lane, DEPTH: tl.constexpr, COUNT: tl.constexpr
):
    tiles = ()
    for step in tl.static_range(COUNT):
        first = row + step * DEPTH
        mask = (lane < end - first)[None, :, None] & inside
        place = first * columns.to(tl.int64)
        tiles = tiles + (tl.load(weight + place + tile, mask=mask, other=0),)
    return tiles


@triton.jit
def _on_tensor_cores(
    x, start, present, weight, left, begin, end, columns,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, TERMS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    if PACKED == 4:
        weight = weight.to(tl.pointer_type(tl.int32), bitcast=True)
    lane = tl.arange(0, DEPTH)
    word = left // PACKED + tl.arange(0, WIDTH // PACKED)
    words = columns // PACKED
    tile = lane[:, None] * words + word[None, :]
    sums = _zeros(TOKENS, WIDTH, PACKED)
    for row in range(begin, end, DEPTH):
        below = lane < end - row
        packed = tl.load(
            weight + row * words.to(tl.int64) + tile,
            mask=below[:, None] & (word < words)[None, :],
            other=0,
        )
        activation = tl.load(
            x + row + start[:, None] + lane[None, :],
            mask=present[:, None] & below[None, :],
            other=0.0,
        )
        terms = _terms(activation, TERMS)
        added = ()
        for column in tl.static_range(PACKED):
            number = float32_from_byte(packed.to(tl.int32) >> 8 * column).to(terms[0].dtype)
            total = sums[column]
            for term in tl.static_range(TERMS):
                total = tl.dot(terms[term], number, total)
            added = added + (total,)
        sums = added
    return sums


@triton.jit
def _terms(activation, TERMS: tl.constexpr):
    if TERMS == 1:
        terms = (activation,)
    else:
        terms = ()
        for _ in tl.static_range(TERMS):
            term = activation.to(tl.bfloat16)
            activation -= term.to(tl.float32)
            terms = terms + (term,)
    return terms
