"""One token for each row: the largest logit, or one draw from the tokens that are kept."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.errors import NumericsError
from export_grok.runtime.params import SamplingParams
from export_grok.runtime.sampling.filters import (
    Ids,
    Logits,
    Mask,
    min_p_mask,
    nucleus_mask,
    scaled,
    top_k_mask,
)

__all__ = ["row_faults", "sample"]


def sample(logits: Logits, params: Sequence[SamplingParams], step: Sequence[int] | Ids) -> Ids:
    """Return the chosen token of each row, int64 [R].

    `repetition_penalty` and `logit_bias` are not applied here: see `adjusted`.

    Args:
        logits: [R, V] float32; -inf forbids a token.
        params: one for each row, R.
        step: how many tokens each row's request has drawn before, R; it counts the random
            numbers.

    Raises:
        NumericsError: a row holds NaN or +inf, or nothing but -inf; all such rows are named.
        ValueError: shapes or dtype do not fit, or a step is negative.
    """
    steps = [int(count) for count in step]
    _check_shapes(logits, params, steps)
    faults = row_faults(logits, steps, params)
    if faults:
        raise NumericsError("; ".join(f"row {row}, {text}" for row, text in faults.items()))
    tokens: Ids = np.argmax(logits, axis=-1)  # the lowest id among equals
    for row, request in enumerate(params):
        if request.temperature > 0:
            # Alone, in arrays of its own: so a row's sums are rounded alike in every batch.
            alone = logits[row : row + 1]
            tokens[row] = _drawn(alone, request, _uniform(request.seed, steps[row]))
    return tokens


def row_faults(
    logits: Logits, steps: Sequence[int] | Ids, params: Sequence[SamplingParams] | None = None
) -> dict[int, str]:
    """Return the rows that cannot be drawn from and why, by row; empty if all can.

    Args:
        logits: [R, V] float32.
        steps: how many tokens each row's request has drawn before, R.
        params: one for each row, R, to tell what a request forbids from what the engine does.
    """
    # The maximum alone shows all three: it is NaN, +inf, or -inf when nothing is allowed.
    faults = {}
    for row in np.flatnonzero(~np.isfinite(logits.max(axis=-1))).tolist():
        bias = params[row].logit_bias if params else {}
        faults[row] = f"step {steps[row]}: {_fault(logits[row], bias)}"
    return faults


def _drawn(logits: Logits, request: SamplingParams, u: float) -> int:
    x = scaled(logits, [request.temperature])
    filters: list[tuple[Callable[[Logits, Any], Mask], float, float]] = [
        (top_k_mask, request.top_k, 0),
        (nucleus_mask, request.top_p, 1),
        (min_p_mask, request.min_p, 0),
    ]
    # Tokens that are removed are left behind: what comes after is as fast as the others are few.
    narrowed = []
    for mask_of, value, off in filters:
        if value != off:
            kept = np.flatnonzero(mask_of(x, [value])[0])
            x = x[:, kept]
            narrowed.append(kept)
    exact = x[0].astype(np.float64)
    mass = np.cumsum(np.exp(exact - exact.max()))
    # u < 1 stays below the whole mass even when rounded, and a token without mass is passed over
    # as its sum equals the one before: the token found is always one that is kept.
    token = np.searchsorted(mass, u * mass[-1], side="right")
    for kept in reversed(narrowed):
        token = kept[token]
    return int(token)


def _uniform(seed: int, step: int) -> float:
    # Bits are taken straight from the counter-based generator: what numpy makes of them in its
    # own distributions may change with its version, these will not.
    bits = int(np.random.Philox(key=seed, counter=step).random_raw())
    return (bits >> 11) * 2.0**-53


def _fault(row: NDArray[np.float32], bias: Mapping[int, float]) -> str:
    wrong = np.flatnonzero(np.isnan(row) | np.isposinf(row))
    if wrong.size:
        return (
            f"{wrong.size} of {row.size} logits are NaN or +inf, the first is {row[wrong[0]]} at "
            f"token {wrong[0]}; compare the engine with the reference, or build it in a wider "
            "dtype"
        )
    banned = list(bias.values()).count(-np.inf)
    if banned == row.size:
        return f"the request's logit_bias forbids every token ({banned}); leave one to choose"
    if banned:
        return (
            f"the request's logit_bias forbids {banned} of {row.size} tokens and the engine all "
            "others; forbid fewer"
        )
    return (
        "every logit is -inf, which forbids every token; compare the engine with the reference, "
        "or build it in a wider dtype"
    )


def _check_shapes(logits: Logits, params: Sequence[SamplingParams], steps: list[int]) -> None:
    faults = []
    if logits.ndim != 2 or logits.dtype != np.float32 or logits.shape[-1] == 0:
        faults.append(f"logits are {logits.dtype} {logits.shape}; they must be float32 [R, V]")
    for name, count in (("params", len(params)), ("step", len(steps))):
        if logits.ndim and count != len(logits):
            faults.append(f"{name} has {count} entries; it must have one for each of the R rows")
    if any(count < 0 for count in steps):
        faults.append(f"step is {steps}; a row has drawn 0 tokens or more")
    if faults:
        raise ValueError("; ".join(faults))
