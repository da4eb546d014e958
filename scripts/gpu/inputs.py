"""Random inputs of a call: values about 1, every code of int8, NaN where nothing may be read."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.plugins.plugin_node import Shape
from scripts.gpu.cases import Case

__all__ = ["Array", "random_codes", "random_inputs", "random_scales", "spread_inputs"]

Array = NDArray[Any]

# Standard deviation of a uniformly random int8.
INT8_DEVIATION = math.sqrt((256**2 - 1) / 12)
NOTHING = float("-inf")
# The gigabytes of a large matrix take far longer to draw than to check. A prime: no row, column or
# tile of a matrix is another one.
PIECE = 67_108_859


Draw = Callable[[np.random.Generator, Shape, Mapping[str, Shape]], Array]


def random_inputs(
    case: Case, random: np.random.Generator, special: Mapping[str, Draw] | None = None
) -> dict[str, Array]:
    """Return the inputs of a call by name; `special` draws some of them in another way."""
    drawn = {**_SPECIAL, **(special or {})}
    call, node = case.call, case.node
    letters = {"T": call.dtype, "scale": call.scales}
    found: dict[str, Array] = {}
    for row in node.inputs:
        shape, dtype = call.shapes[row.name], ELEMENTS[letters.get(row.dtype, row.dtype)]
        if row.dtype == "int8":
            found[row.name] = random_codes(random, shape)
        elif row.dtype == "scale":
            weight = call.shapes[row.name.replace("scales", "weight")]
            found[row.name] = random_scales(random, shape, weight[-2]).astype(dtype)
        elif row.name in drawn:
            found[row.name] = drawn[row.name](random, shape, call.shapes).astype(dtype)
        else:
            found[row.name] = random.standard_normal(shape, np.float32).astype(dtype)
    if "stats" in found:
        # A part of which a row sees nothing; the first has a slot at least.
        dead = random.random(found["stats"].shape[:3]) < 0.3
        dead[:, :, 0] = False
        found["sums"][dead] = 0
        found["stats"][dead] = [NOTHING, 0]
    for name in ("k_cache", "v_cache") if "start" in found else ():
        for cache, start in zip(found[name], found["start"], strict=True):
            cache[:, start + 1 :] = np.nan
    return found


def spread_inputs(case: Case, random: np.random.Generator) -> dict[str, Array]:
    """Return inputs to take times with: as many experts as there can be, and full caches."""

    def experts(_random: np.random.Generator, shape: Shape, shapes: Mapping[str, Shape]) -> Array:
        return np.arange(math.prod(shape)).reshape(shape) % _count(shapes)

    def start(_random: np.random.Generator, shape: Shape, shapes: Mapping[str, Shape]) -> Array:
        return np.full(shape, shapes["k_cache"][2] - 1)

    return random_inputs(case, random, {"experts": experts, "start": start})


def random_codes(random: np.random.Generator, shape: Shape) -> Array:
    """Return int8 numbers, all equally likely; many repeat a piece of `PIECE` that is drawn."""
    count = math.prod(shape)
    # Whole words are several times as fast as bytes.
    words = random.integers(0, 1 << 64, -(-min(count, PIECE) // 8), dtype=np.uint64)
    piece = words.view(np.int8)[: min(count, PIECE)]
    return np.resize(piece, shape)


def random_scales(random: np.random.Generator, shape: Shape, rows: int) -> Array:
    """Return scales of both signs, which differ by a factor of 10; products are about 1."""
    sizes = random.uniform(0.2, 2, shape) / (INT8_DEVIATION * math.sqrt(rows))
    scales: Array = sizes * random.choice([-1, 1], shape)
    return scales


def _experts(random: np.random.Generator, shape: Shape, shapes: Mapping[str, Shape]) -> Array:
    return random.integers(0, _count(shapes), shape)  # the same twice, too


def _count(shapes: Mapping[str, Shape]) -> int:
    return next(shape[0] for name, shape in shapes.items() if name.endswith("_weight"))


def _start(random: np.random.Generator, shape: Shape, shapes: Mapping[str, Shape]) -> Array:
    slots = shapes["k_cache"][2]
    start = random.integers(0, slots, shape)
    start[random.integers(len(start))] = slots - 1
    return start


def _stats(random: np.random.Generator, shape: Shape, _shapes: Mapping[str, Shape]) -> Array:
    largest, total = random.uniform(-30, 30, shape[:-1]), random.uniform(1, 64, shape[:-1])
    return np.stack([largest, total], -1)


_SPECIAL: dict[str, Draw] = {
    "experts": _experts,
    "gates": lambda random, shape, _shapes: random.uniform(0.05, 0.9, shape),
    "start": _start,
    "stats": _stats,
}
