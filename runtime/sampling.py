"""Logits to tokens: temperature, the k best, the nucleus, one draw.

With l the logits and u the row's random number in [0, 1)::

    x = l / temperature
    keep = the top_k largest x, and of those the nucleus of mass top_p
    p = softmax(x over keep)
    token = the first id with p[0] + ... + p[id] > u

Legend: `B` rows of a batch, `V` vocabulary. No row looks at another or at its own place.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from export_grok.errors import NumericsError
from export_grok.runtime.params import SamplingParams

__all__ = [
    "filtered",
    "nucleus_mask",
    "sample",
    "scaled",
    "top_k_mask",
    "top_probabilities",
]

Logits = NDArray[np.float32]
Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]

_REMOVED = np.float32(-1e10)


def sample(logits: Logits, params: Sequence[SamplingParams], step: Sequence[int] | Ids) -> Ids:
    """Return the chosen token of each row, int64 [B].

    Args:
        logits: [B, V] float32; -inf forbids a token.
        params: one for each row, B.
        step: how many tokens each row has drawn before, B; it counts the random numbers.

    Raises:
        NumericsError: a row holds NaN or +inf, or nothing but -inf; all such rows are named.
        ValueError: shapes or dtype do not fit, or a step is negative.
    """
    steps = [int(count) for count in step]
    _check_shapes(logits, params, steps)
    _check_numbers(logits, steps)
    tokens: Ids = np.argmax(logits, axis=-1)  # the lowest id among equals
    drawn = [row for row, request in enumerate(params) if request.temperature > 0]
    if not drawn:
        return tokens
    requests = [params[row] for row in drawn]
    # One memory layout, so that a row's sums are rounded alike in every batch.
    x = np.ascontiguousarray(logits[drawn])
    x = scaled(x, [request.temperature for request in requests])
    keep = top_k_mask(x, [request.top_k for request in requests])
    # Here a removed token is -inf: at a tiny temperature -1e10 can be the largest value of a row.
    x = np.where(keep, x, np.float32(-np.inf))
    keep = keep & nucleus_mask(x, [request.top_p for request in requests])
    u = np.array([[_uniform(params[row].seed, steps[row])] for row in drawn])
    mass = np.cumsum(np.where(keep, _softmax(x), 0.0), axis=-1)
    # u < 1 stays below the whole mass even when rounded, and a token without mass is passed over
    # as its sum equals the one before: the token found is always one that is kept.
    target = u * mass[:, -1:]
    tokens[drawn] = np.count_nonzero(mass <= target, axis=-1)
    return tokens


def scaled(logits: Logits, temperature: Sequence[float] | NDArray[np.float32]) -> Logits:
    """Return logits / temperature, float32 [B, V], the temperature rounded to float32 first.

    Where a quotient leaves float32 (and for temperature 0) the row is its limit: 0 for the
    largest logits, -inf for all others.

    Args:
        logits: [B, V] float32, the largest of each row finite.
        temperature: [B], 0 or more.
    """
    divisor = np.asarray(temperature, dtype=np.float32)[:, None]
    largest = logits.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        quotient = logits / divisor
        inside = np.isfinite(largest / divisor)
    # Logits that differ at all are more than 1e31 apart here, so the limit is exact.
    limit = np.where(logits == largest, np.float32(0), np.float32(-np.inf))
    return np.where(inside, quotient, limit)


def top_k_mask(logits: Logits, top_k: Sequence[int] | Ids) -> Mask:
    """Return which tokens are among the `top_k` largest of their row, bool [B, V].

    Exactly `top_k` are kept: of equals at the border, the lowest ids. 0, or V and more, keeps all.

    Args:
        logits: [B, V] float32 without NaN.
        top_k: [B].
    """
    rows, vocabulary = logits.shape
    keep = np.ones((rows, vocabulary), dtype=np.bool_)
    for row, k in enumerate(top_k):
        if 0 < k < vocabulary:
            threshold = np.partition(logits[row], vocabulary - k)[vocabulary - k]
            keep[row] = logits[row] > threshold
            equals = np.flatnonzero(logits[row] == threshold)
            keep[row, equals[: k - np.count_nonzero(keep[row])]] = True
    return keep


def nucleus_mask(logits: Logits, top_p: Sequence[float] | NDArray[np.float32]) -> Mask:
    """Return which tokens are in the nucleus of mass `top_p` of their row, bool [B, V].

    In ascending order, the first token at which the summed probability reaches 1 - top_p sets the
    threshold; every logit at or above it is kept, so equals are kept or removed together. 1 keeps
    all; 0 keeps the largest and its equals, where the original program's sum, rounded below 1,
    could keep everything.

    Args:
        logits: [B, V] float32, the largest of each row finite.
        top_p: [B], 0 to 1, rounded to float32 as in the original.
    """
    start = np.float32(1) - np.asarray(top_p, dtype=np.float32)
    keep = np.ones(logits.shape, dtype=np.bool_)
    cut = np.flatnonzero(start > 0)  # sorting a row is most of the work: only where it matters
    if cut.size:
        ascending = np.sort(logits[cut], axis=-1)
        # float64: summed in another order than the original, it is at least the exact sum.
        before = np.cumsum(_softmax(ascending), axis=-1) < start[cut, None]
        first = np.minimum(np.count_nonzero(before, axis=-1), logits.shape[-1] - 1)
        keep[cut] = logits[cut] >= np.take_along_axis(ascending, first[:, None], axis=-1)
    return keep


def filtered(logits: Logits, keep: Mask) -> Logits:
    """Return the logits with -1e10 where `keep` [B, V] is false, as the original marks them."""
    return np.where(keep, logits, _REMOVED)


def top_probabilities(logits: Logits, k: int) -> tuple[Ids, Logits]:
    """Return the `k` most probable tokens of each row and their probabilities, largest first.

    Equals come in the order of their ids. All V are returned if `k` is more.

    Args:
        logits: [B, V] float32, the largest of each row finite.
        k: 1 or more.

    Returns:
        int64 [B, k] and float32 [B, k].

    Raises:
        ValueError: k is less than 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be 1 or more")
    rows = logits.shape[0]
    ids = np.nonzero(top_k_mask(logits, [k] * rows))[1].reshape(rows, -1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=-1), axis=-1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=-1)
    return ids, np.take_along_axis(_softmax(logits), ids, axis=-1).astype(np.float32)


def _softmax(logits: Logits) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    weights = np.exp(exact - exact.max(axis=-1, keepdims=True))
    probabilities: NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return probabilities


def _uniform(seed: int, step: int) -> float:
    # Bits are taken straight from the counter-based generator: what numpy makes of them in its
    # own distributions may change with its version, these will not.
    bits = int(np.random.Philox(key=seed, counter=step).random_raw())
    return (bits >> 11) * 2.0**-53


def _check_shapes(logits: Logits, params: Sequence[SamplingParams], steps: list[int]) -> None:
    faults = []
    if logits.ndim != 2 or logits.dtype != np.float32 or logits.shape[-1] == 0:
        faults.append(f"logits are {logits.dtype} {logits.shape}; they must be float32 [B, V]")
    for name, count in (("params", len(params)), ("step", len(steps))):
        if logits.ndim and count != len(logits):
            faults.append(f"{name} has {count} entries; it must have one for each of the B rows")
    if any(count < 0 for count in steps):
        faults.append(f"step is {steps}; a row has drawn 0 tokens or more")
    if faults:
        raise ValueError("; ".join(faults))


def _check_numbers(logits: Logits, steps: list[int]) -> None:
    # The maximum alone shows all three: it is NaN, +inf, or -inf when nothing is allowed.
    faults = []
    for row in np.flatnonzero(~np.isfinite(logits.max(axis=-1))):
        wrong = np.flatnonzero(np.isnan(logits[row]) | np.isposinf(logits[row]))
        what = (
            f"{wrong.size} of {logits.shape[-1]} logits are NaN or +inf, the first is "
            f"{logits[row, wrong[0]]} at token {wrong[0]}"
            if wrong.size
            else "every logit is -inf, which forbids every token"
        )
        faults.append(f"row {row}, step {steps[row]}: {what}")
    if faults:
        raise NumericsError(
            "; ".join(faults) + ". A row needs a finite logit, and NaN or +inf nowhere: compare "
            "the engine with the reference, or build it in a wider dtype"
        )
