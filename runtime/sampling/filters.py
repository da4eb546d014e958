"""Which tokens may be drawn: temperature, the k best, the nucleus, the least probability.

They are used in the order temperature, top_k, top_p, min_p, as in Hugging Face Transformers
(`_get_logits_processor` of generation/utils.py). In vLLM min_p comes before top_k and top_p
(`Sampler` of v1/sample/sampler.py), so that of what it leaves the nucleus is cut: where both are
used, fewer tokens may remain there.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Ids",
    "Logits",
    "Mask",
    "filtered",
    "min_p_mask",
    "nucleus_mask",
    "scaled",
    "top_k_mask",
]

Logits = NDArray[np.float32]
Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]

_REMOVED = np.float32(-1e10)

# Values that one maximum stands for in the search for the largest of a row.
_BLOCK = 64


def scaled(logits: Logits, temperature: Sequence[float] | NDArray[np.float32]) -> Logits:
    """Return logits / temperature, float32 [R, V], the temperature rounded to float32 first.

    Where a quotient leaves float32 (and for temperature 0) the row is its limit: 0 for the
    largest logits, -inf for all others.

    Args:
        logits: [R, V] float32, the largest of each row finite.
        temperature: [R], 0 or more.
    """
    divisor = np.asarray(temperature, dtype=np.float32)[:, None]
    largest = logits.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        quotient: Logits = logits / divisor
        inside = np.isfinite(largest / divisor)
    if inside.all():
        return quotient
    # Logits that differ at all are more than 1e31 apart here, so the limit is exact.
    limit = np.where(logits == largest, np.float32(0), np.float32(-np.inf))
    return np.where(inside, quotient, limit)


def top_k_mask(logits: Logits, top_k: Sequence[int] | Ids) -> Mask:
    """Return which tokens are among the `top_k` largest of their row, bool [R, V].

    Exactly `top_k` are kept: of equals at the border, the lowest ids. 0, or V and more, keeps all.

    Args:
        logits: [R, V] float32 without NaN.
        top_k: [R].
    """
    rows, vocabulary = logits.shape
    keep = np.ones((rows, vocabulary), dtype=np.bool_)
    for row, k in enumerate(top_k):
        if 0 < k < vocabulary:
            threshold = _kth_largest(logits[row], k)
            keep[row] = logits[row] > threshold
            equals = np.flatnonzero(logits[row] == threshold)
            keep[row, equals[: k - np.count_nonzero(keep[row])]] = True
    return keep


def nucleus_mask(logits: Logits, top_p: Sequence[float] | NDArray[np.float32]) -> Mask:
    """Return which tokens are in the nucleus of mass `top_p` of their row, bool [R, V].

    In ascending order, the first token at which the summed probability reaches 1 - top_p sets the
    threshold; every logit at or above it is kept, so equals are kept or removed together. 1 keeps
    all; 0 keeps the largest and its equals, where the original program's sum, rounded below 1,
    could keep everything.

    Args:
        logits: [R, V] float32, the largest of each row finite.
        top_p: [R], 0 to 1, rounded to float32 as in the original.
    """
    start = np.float32(1) - np.asarray(top_p, dtype=np.float32)
    keep = np.ones(logits.shape, dtype=np.bool_)
    for row in np.flatnonzero(start > 0):
        keep[row] = logits[row] >= _nucleus_threshold(logits[row], float(start[row]))
    return keep


def min_p_mask(logits: Logits, min_p: Sequence[float]) -> Mask:
    """Return which tokens have at least `min_p` times the largest probability, bool [R, V].

    0 keeps all; 1 keeps the largest and its equals.

    Args:
        logits: [R, V] float32, the largest of each row finite.
        min_p: [R], 0 to 1.
    """
    with np.errstate(divide="ignore"):
        distance = np.log(np.asarray(min_p, dtype=np.float64))[:, None]
    # exp(x) >= min_p * exp(largest), as logarithms: 1 asks for the largest itself.
    mask: Mask = logits >= logits.max(axis=-1, keepdims=True) + distance
    return mask


def filtered(logits: Logits, keep: Mask) -> Logits:
    """Return the logits with -1e10 where `keep` [R, V] is false, as the original marks them."""
    return np.where(keep, logits, _REMOVED)


def _kth_largest(row: NDArray[np.float32], k: int) -> np.float32:
    # Each of k blocks has a value of at least the k-th largest maximum of a block, so none of the
    # k largest values is below that: few are left to look at.
    maxima = np.maximum.reduceat(row, np.arange(0, row.size, _BLOCK))
    if k < maxima.size:
        row = row[row >= np.partition(maxima, -k)[-k]]
    threshold: np.float32 = np.partition(row, -k)[-k]
    return threshold


def _nucleus_threshold(row: NDArray[np.float32], start: float) -> np.float32:
    # float64: summed in another order than the original, it is at least the exact sum.
    exact = row.astype(np.float64)
    largest = exact.max()
    weights = np.exp(exact - largest)
    reached = start * weights.sum()
    # Weights below reached / V are less than that together, so no sum gets there among them: they
    # are added up as they come, and only the others are sorted.
    high = np.flatnonzero(weights >= reached / row.size)
    ascending = np.sort(row[high])
    weights[high] = 0
    sums = weights.sum() + np.cumsum(np.exp(ascending - largest))
    first = min(int(np.count_nonzero(sums < reached)), high.size - 1)
    threshold: np.float32 = ascending[first]
    return threshold
