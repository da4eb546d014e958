"""Made-up outputs of a layer for one step of rows of different length, one of them empty."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.runtime.verify.steps import Step
from export_grok.runtime.verify.tolerances import TENSORS, Tolerances

__all__ = [
    "ALLOWED",
    "CACHES",
    "FLOATS",
    "STEP",
    "TOKENS",
    "Arrays",
    "copied",
    "layer",
    "padding",
    "tolerances",
    "top",
    "written",
]

Arrays = dict[str, NDArray[Any]]

STEP = Step(
    name="prefill 2",
    tokens=np.arange(12).reshape(3, 4),
    start=np.array([0, 3, 7]),
    length=np.array([4, 2, 0]),
)
# Row and place in the step of what counts, in order.
TOKENS = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
HEADS, SIZE, SLOTS, WIDTH, EXPERTS, CHOSEN = 2, 4, 12, 6, 8, 2
CACHES = {"k_out": "k_cache", "v_out": "v_cache"}
FLOATS = ("k_out", "v_out", "heads", "attention", "gates", "moe", "h_out")

ALLOWED = 1e-3


def tolerances(**tensors: float) -> Tolerances:
    """Return the same for all tensors, but for experts, and those that are given."""
    same = dict.fromkeys(TENSORS, ALLOWED) | {"experts": 0.0}
    return Tolerances(tensors=same | tensors, near_tie=1e-2)


def layer(seed: int = 0) -> tuple[Arrays, Arrays]:
    """Return outputs with all taps, where no choice of experts is near a tie, and the inputs."""
    random = np.random.default_rng(seed)
    rows, tokens = STEP.tokens.shape

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape, np.float32)

    inputs: Arrays = {name: normal(rows, HEADS, SLOTS, SIZE) for name in CACHES.values()}
    inputs["start"] = STEP.start
    outputs: Arrays = {}
    for name, cache in CACHES.items():
        outputs[name] = inputs[cache].copy()
        for row, start in enumerate(STEP.start):
            outputs[name][row, :, start : start + tokens] = normal(HEADS, tokens, SIZE)
    for name, width in {"heads": HEADS * SIZE, "attention": WIDTH, "moe": WIDTH}.items():
        outputs[name] = normal(rows, tokens, width)
    outputs["h_out"] = normal(rows, tokens, WIDTH)
    ladder = np.geomspace(1, 20, EXPERTS)
    order = random.permuted(np.tile(ladder / ladder.sum(), (rows, tokens, 1)), axis=-1)
    outputs["probabilities"] = order.astype(np.float32)
    outputs |= top(outputs["probabilities"])
    return outputs, inputs


def top(probabilities: NDArray[np.float32]) -> Arrays:
    """Return the most probable experts [B, S, C], the first one first, and their gates."""
    experts = np.argsort(-probabilities, axis=-1)[..., :CHOSEN]
    return {
        "experts": experts.astype(np.int64),
        "gates": np.take_along_axis(probabilities, experts, axis=-1),
    }


def copied(arrays: Arrays) -> Arrays:
    """Return arrays that may be changed."""
    return {name: array.copy() for name, array in arrays.items()}


def written(name: str, array: NDArray[Any], row: int, place: int) -> NDArray[Any]:
    """Return what an output has for one token of the step, as a view."""
    part: NDArray[Any] = (
        array[row, :, STEP.start[row] + place] if name in CACHES else array[row, place]
    )
    return part


def padding() -> list[tuple[int, int]]:
    """Return row and place in the step of what does not count."""
    return [(int(row), int(place)) for row, place in np.argwhere(~STEP.counts)]
