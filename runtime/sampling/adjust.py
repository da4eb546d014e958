"""Logits changed for one request: the penalty of what was said before, and its own bias."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from export_grok.runtime.params import LARGEST_FLOAT32, SamplingParams
from export_grok.runtime.sampling.filters import Ids, Logits

__all__ = ["adjusted"]

History = Sequence[int] | NDArray[np.integer]


def adjusted(
    logits: Logits, params: Sequence[SamplingParams], histories: Sequence[History]
) -> Logits:
    """Return the logits after `repetition_penalty` and then `logit_bias`, float32 [R, V].

    The penalty is that of Hugging Face Transformers (`RepetitionPenaltyLogitsProcessor`): once
    for every token that the history holds, however often. Arithmetic is float32. A finite logit
    that a penalty would take beyond float32 becomes the largest or the lowest finite number, so
    a penalty never forbids a token; 0 and -inf stay what they are. What is NaN or +inf stays
    NaN or +inf under a penalty, and becomes NaN at most under a bias: a fault of the engine is
    still seen.

    Args:
        logits: [R, V] float32; never written to.
        params: one for each row, R.
        histories: token ids of each row's prompt and answer so far, R; only looked at in rows
            with a penalty.

    Returns:
        The array given, if no row has a penalty or a bias; else a new one.

    Raises:
        ValueError: the numbers of rows differ.
    """
    if not len(logits) == len(params) == len(histories):
        raise ValueError(
            f"{len(logits)} rows of logits, {len(params)} params, {len(histories)} histories; "
            "each row must have one of each"
        )
    if all(request.repetition_penalty == 1 and not request.logit_bias for request in params):
        return logits
    result = logits.copy()
    for row, request, history in zip(result, params, histories, strict=True):
        if request.repetition_penalty != 1:
            _penalise(row, np.float32(request.repetition_penalty), np.asarray(history, np.int64))
        if request.logit_bias:
            ids = np.fromiter(request.logit_bias, np.int64)
            bias = np.fromiter(request.logit_bias.values(), np.float32)
            with np.errstate(invalid="ignore"):  # +inf and a ban
                row[ids] += bias
    return result


def _penalise(row: NDArray[np.float32], penalty: np.float32, ids: Ids) -> None:
    # A token that comes twice is read before anything is written, so it is changed once.
    before = row[ids]
    with np.errstate(over="ignore", under="ignore"):
        after = np.where(before > 0, before / penalty, before * penalty)
    limit = np.float32(LARGEST_FLOAT32)
    row[ids] = np.where(np.isfinite(before), np.clip(after, -limit, limit), before)
