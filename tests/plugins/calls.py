"""Calls of the ops whose shapes are multiples of nothing, and that reach each way of the kernels.

Weights have every code; scales have both signs.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.plugins.formulas import Array, Call

__all__ = [
    "ATTENTION",
    "CALLS",
    "EXPERTS",
    "FEW",
    "LINEAR",
    "SCALES",
    "Choose",
    "attention_call",
    "experts_call",
    "linear_call",
]

Choose = Callable[[np.random.Generator, int, int], Array]

SCALES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def stored(
    random: np.random.Generator, *shape: int, groups: int, scales: str, size: float = 1.0
) -> tuple[Array, Array]:
    """Return int8 matrices [.., K, N], and scales [.., R, N] of some size / 128."""
    weight = random.integers(-128, 128, shape, dtype=np.int8)
    factors = random.choice([-1, 1], (*shape[:-2], groups, shape[-1])) * size / 128
    factors *= random.uniform(0.1, 1, factors.shape)
    return weight, factors.astype(SCALES[scales])


def linear_call(
    tokens: int,
    rows: int,
    columns: int,
    groups: int = 1,
    scales: str = "float32",
    *,
    size: float = 1.0,
    outlier: float = 1.0,
    zeros: bool = False,
    seed: int = 0,
) -> Call:
    """Return a call; with `zeros` every third row of x is nothing but zeros."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(tokens, rows)).astype(np.float32)
    x[:, rows // 2] *= outlier
    if zeros:
        x[::3] = 0
    weight, factors = stored(random, rows, columns, groups=groups, scales=scales, size=size)
    return Call(op="int8_linear", inputs={"x": x, "weight": weight, "scales": factors})


SUBNORMAL = 2.0**-13  # of scales: float16 has no more than these from 6.1e-5 down

LINEAR: dict[str, Call] = {
    "one-number": linear_call(1, 1, 1),
    "one-column": linear_call(3, 65, 1, scales="bfloat16"),
    "one-row": linear_call(9, 1, 300, scales="float16"),
    "one-token": linear_call(1, 300, 65, scales="bfloat16"),
    "two-tokens": linear_call(2, 31, 31, scales="float16"),
    "three-tokens": linear_call(3, 65, 300),
    "four-tokens-in-groups": linear_call(4, 1544, 31, 8, "bfloat16"),
    "five-tokens-in-groups-of-one": linear_call(5, 8, 3, 8),
    "six-tokens": linear_call(6, 31, 65),
    "seven-tokens": linear_call(7, 1544, 31, scales="float16"),
    "the-last-that-stream": linear_call(8, 300, 65, scales="bfloat16"),
    "the-first-in-blocks": linear_call(9, 65, 1),
    "tile-and-one": linear_call(15, 31, 300, scales="float16"),
    "tiles-in-groups": linear_call(28, 1544, 65, 8, "bfloat16"),
    "the-last-of-wide-blocks": linear_call(32, 65, 300),
    "the-first-of-narrow-blocks": linear_call(33, 300, 300, scales="float16"),
    "129-tokens": linear_call(129, 1544, 300, 8, "float16"),
    "one-token-in-parts": linear_call(1, 1601, 2051, scales="bfloat16"),
    "three-tokens-in-parts-of-groups": linear_call(3, 1544, 2051, 2, "float16"),
    "many-shares": linear_call(9, 40, 2051, 8),
    "subnormal-scales": linear_call(4, 65, 65, 5, "float16", size=SUBNORMAL),
    "subnormal-scales-in-blocks": linear_call(17, 65, 65, 5, "float16", size=SUBNORMAL),
    "zeros": linear_call(7, 65, 31, zeros=True),
    "zeros-in-blocks": linear_call(17, 300, 31, zeros=True),
    "outlier": linear_call(2, 300, 65, 4, "bfloat16", outlier=1e3),
    "outlier-in-blocks": linear_call(31, 1544, 65, 8, "bfloat16", outlier=1e3),
}


def any_two(random: np.random.Generator, tokens: int, experts: int) -> Array:
    return np.stack([random.permutation(experts)[:2] for _ in range(tokens)])


def all_the_last(_random: np.random.Generator, tokens: int, experts: int) -> Array:
    return np.full((tokens, 1), experts - 1)


def odd_ones(random: np.random.Generator, tokens: int, experts: int) -> Array:
    """Leave every other expert without a row, the first too."""
    return any_two(random, tokens, experts // 2) * 2 + 1


def same_twice(random: np.random.Generator, tokens: int, experts: int) -> Array:
    return np.repeat(random.integers(0, experts, (tokens, 1)), 2, axis=1)


def experts_call(
    tokens: int,
    model: int,
    width: int,
    choose: Choose = any_two,
    groups: tuple[int, int, int] = (1, 1, 1),
    scales: str = "float32",
    *,
    experts: int = 4,
    outlier: float = 1.0,
    seed: int = 1,
) -> Call:
    """Return a call; `choose` gives the experts [T, C], `groups` those of gate, up and down."""
    random = np.random.default_rng(seed)
    chosen = choose(random, tokens, experts).astype(np.int64)
    x = random.normal(size=(tokens, model)).astype(np.float32)
    x[:, model // 2] *= outlier
    inputs: dict[str, Array] = {
        "x": x,
        "gates": random.uniform(0.05, 0.9, chosen.shape).astype(np.float32),
        "experts": chosen,
    }
    shapes = {"gate": (model, width), "up": (model, width), "down": (width, model)}
    for (name, shape), parts in zip(shapes.items(), groups, strict=True):
        matrices = stored(random, experts, *shape, groups=parts, scales=scales, size=0.5)
        inputs[f"{name}_weight"], inputs[f"{name}_scales"] = matrices
    return Call(op="moe_experts", inputs=inputs)


EXPERTS: dict[str, Call] = {
    "one-token": experts_call(1, 65, 31, scales="bfloat16"),
    "three-tokens-in-groups": experts_call(3, 24, 40, groups=(1, 1, 8), scales="float16"),
    "nine-tokens": experts_call(9, 31, 65),
    "all-on-one": experts_call(5, 31, 33, all_the_last, scales="bfloat16"),
    "all-on-one-in-blocks": experts_call(40, 31, 33, all_the_last, (1, 1, 3), "float16"),
    "one-for-each-of-four": experts_call(1, 31, 300, same_twice),
    "the-same-twice": experts_call(7, 31, 65, same_twice),
    "some-without-rows": experts_call(33, 65, 31, odd_ones, experts=8),
    "other-groups-for-up": experts_call(9, 40, 24, groups=(1, 8, 4), scales="bfloat16"),
    "other-groups-for-up-in-blocks": experts_call(30, 40, 24, groups=(2, 8, 1), experts=2),
    "wide": experts_call(2, 9, 2051, experts=2),
    "more-choices-than-go-at-once": experts_call(300, 15, 9, scales="bfloat16"),
    "outlier": experts_call(25, 65, 33, groups=(5, 5, 1), outlier=1e3),
}


def attention_call(
    start: list[int],
    tokens: int,
    slots: int,
    *,
    group: int = 6,
    kv_heads: int = 2,
    size: int = 24,
    loudness: float = 1.0,
    beyond: float = float("nan"),
    seed: int = 2,
) -> Call:
    """Return a call on a cache with `start` tokens in each row, and `beyond` behind them."""
    random = np.random.default_rng(seed)
    batch, heads = len(start), group * kv_heads

    def normal(*shape: int) -> Array:
        return random.normal(size=shape).astype(np.float32)

    inputs: dict[str, Array] = {
        "query": np.float32(loudness) * normal(batch, tokens, heads * size),
        "key": normal(batch, tokens, kv_heads * size),
        "value": normal(batch, tokens, kv_heads * size),
        "k_cache": normal(batch, kv_heads, slots, size),
        "v_cache": normal(batch, kv_heads, slots, size),
        "start": np.array(start, np.int64),
    }
    for row, length in enumerate(start):
        for name in ("k_cache", "v_cache"):
            inputs[name][row, :, length:] = beyond
    attributes = {"num_heads": heads, "kv_heads": kv_heads, "scale": 0.3, "cap": 30.0}
    return Call(op="softcap_attention", inputs=inputs, attributes=attributes)


ATTENTION: dict[str, Call] = {
    "first-token": attention_call([0], 1, 1),
    "prompt-fills-the-cache": attention_call([0], 9, 9, size=4),
    "last-slot": attention_call([64], 1, 65),
    "ragged-step": attention_call([0, 4, 130], 1, 133, size=80),
    "ragged-chunk": attention_call([0, 61, 20], 9, 71),
    "ragged-chunk-of-one-head": attention_call([13, 0], 19, 33, group=1, kv_heads=1, size=128),
    "a-key-head-for-each": attention_call([3, 11], 1, 13, group=1, kv_heads=3, size=4),
    "splits": attention_call([0, 1299, 512], 1, 1300, size=4),
    "splits-of-which-a-row-sees-one": attention_call([3, 600], 1, 700, group=1, size=80),
    "one-split": attention_call([511], 1, 600, group=5, size=8),
    "long-chunk": attention_call([500, 3], 17, 530, group=1, size=24),
    "loud": attention_call([3, 70], 9, 80, loudness=60.0),
    "loud-step": attention_call([600, 70], 1, 700, loudness=60.0, kv_heads=1),
}

CALLS: dict[str, Call] = {
    f"{op}-{name}": call
    for op, calls in (("linear", LINEAR), ("experts", EXPERTS), ("attention", ATTENTION))
    for name, call in calls.items()
}
# Of each way one, for where a call is dear.
FEW: tuple[str, ...] = (
    "linear-one-number",
    "linear-one-column",
    "linear-one-row",
    "linear-one-token",
    "linear-three-tokens",
    "linear-five-tokens-in-groups-of-one",
    "linear-three-tokens-in-parts-of-groups",
    "linear-the-last-that-stream",
    "linear-the-first-in-blocks",
    "linear-tile-and-one",
    "linear-the-first-of-narrow-blocks",
    "linear-subnormal-scales-in-blocks",
    "linear-zeros-in-blocks",
    "linear-many-shares",
    "experts-one-token",
    "experts-three-tokens-in-groups",
    "experts-all-on-one-in-blocks",
    "experts-the-same-twice",
    "experts-some-without-rows",
    "experts-other-groups-for-up-in-blocks",
    "attention-first-token",
    "attention-prompt-fills-the-cache",
    "attention-last-slot",
    "attention-ragged-chunk",
    "attention-a-key-head-for-each",
    "attention-splits",
    "attention-loud",
)
