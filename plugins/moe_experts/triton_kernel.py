"""moe_experts in Triton: only the matrices of experts that were chosen are read.

A pair is one choice of one token; there are n * C in the order of `experts`. With few pairs a
program takes one of them (BY_PAIR). With more it takes one expert, and those of TOKENS
neighbouring pairs that chose it: an expert's bytes are read once for all of them, an expert nobody
chose is not read, and each pair is still written by exactly one program.

How rows are multiplied with a matrix is told in `int8_linear.triton_kernel`; there, a row of
activations is a token.
"""

# Triton reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors
# ruff: noqa: N803 - upper case is what a kernel is compiled for

import triton
import triton.language as tl

from export_grok.plugins.int8_linear.triton_kernel import rows_times_matrix

__all__ = ["moe_down", "moe_gate_up"]


@triton.jit
def moe_gate_up(
    x, experts, gate_weight, gate_scales, up_weight, up_scales,
    pairs, choices, rows, columns, groups,
    hidden,
    BY_PAIR: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr, TERMS: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write gelu_tanh(x @ Wgate) * (x @ Wup), float32 [n, C, F]; both products are rounded to T.

    Programs: pairs, or experts with blocks of pairs; blocks of columns.
    """
    expert, pair, present = _chosen(experts, pairs, BY_PAIR, TOKENS)
    left = tl.program_id(1) * WIDTH
    if tl.max(present.to(tl.int32), 0) > 0:
        start = pair // choices * rows
        matrix = expert * rows * columns
        scale = expert * groups * columns
        gate = rows_times_matrix(
            x, start, present, gate_weight + matrix, gate_scales + scale, left, 0, rows,
            rows, columns, groups, TOKENS, WIDTH, DEPTH, AHEAD, TERMS, PACKED, ALIGNED,
        )  # fmt: skip
        up = rows_times_matrix(
            x, start, present, up_weight + matrix, up_scales + scale, left, 0, rows,
            rows, columns, groups, TOKENS, WIDTH, DEPTH, AHEAD, TERMS, PACKED, ALIGNED,
        )  # fmt: skip
        gate = gate.to(x.dtype.element_ty).to(tl.float32)
        up = up.to(x.dtype.element_ty).to(tl.float32)
        column = left + tl.arange(0, WIDTH)
        place = pair[:, None] * columns + column[None, :]
        mask = present[:, None] & (column < columns)[None, :]
        tl.store(hidden + place, _gelu(gate) * up, mask=mask)


@triton.jit
def moe_down(
    hidden, gates, experts, down_weight, down_scales,
    pairs, rows, columns, groups,
    partial,
    BY_PAIR: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    AHEAD: tl.constexpr, TERMS: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write gate * (hidden @ Wdown) as sums over parts of F: float32 [P, n, C, M].

    Programs: pairs, or experts with blocks of pairs; blocks of columns; parts.
    """
    expert, pair, present = _chosen(experts, pairs, BY_PAIR, TOKENS)
    left = tl.program_id(1) * WIDTH
    part = tl.program_id(2)
    height = rows // tl.num_programs(2)
    if tl.max(present.to(tl.int32), 0) > 0:
        sums = rows_times_matrix(
            hidden, pair * rows, present, down_weight + expert * rows * columns,
            down_scales + expert * groups * columns, left, part * height, part * height + height,
            rows, columns, groups, TOKENS, WIDTH, DEPTH, AHEAD, TERMS, PACKED, ALIGNED,
        )  # fmt: skip
        gate = tl.load(gates + pair, mask=present, other=0.0).to(tl.float32)
        column = left + tl.arange(0, WIDTH)
        place = (part * pairs + pair)[:, None] * columns + column[None, :]
        mask = present[:, None] & (column < columns)[None, :]
        tl.store(partial + place, sums * gate[:, None], mask=mask)


@triton.jit
def _chosen(experts, pairs, BY_PAIR: tl.constexpr, TOKENS: tl.constexpr):
    """Return the program's expert, int64; the pairs it looks at; which of them it computes."""
    if BY_PAIR:
        pair = tl.program_id(0) + tl.arange(0, TOKENS)
        present = pair == tl.program_id(0)
        expert = tl.load(experts + tl.program_id(0))
    else:
        blocks = tl.cdiv(pairs, TOKENS)
        expert = (tl.program_id(0) // blocks).to(tl.int64)
        pair = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
        present = tl.load(experts + pair, mask=pair < pairs, other=-1) == expert
    return expert, pair, present


@triton.jit
def _gelu(x):
    # 1 + tanh(z) is 2 / (1 + exp(-2z)), which keeps its digits where it is small.
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
