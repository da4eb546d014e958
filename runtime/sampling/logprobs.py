"""How probable the engine found a token, and which others it found most probable."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.runtime.params import SamplingParams
from export_grok.runtime.sampling.filters import Ids, Logits, top_k_mask

__all__ = ["Logprob", "TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True)
class Logprob:
    """One token.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability; -inf if it was forbidden.
    """

    token: int
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of an answer.

    Attributes:
        logprob: natural logarithm of its probability.
        top: the most probable tokens there, the most probable first, of equals the lowest id
            first; the chosen one may or may not be among them.
    """

    logprob: float
    top: tuple[Logprob, ...] = ()


def token_logprobs(
    logits: Logits, tokens: Sequence[int] | Ids, params: Sequence[SamplingParams]
) -> list[TokenLogprobs | None]:
    """Return the logprobs of each row's token, R; None for a row that asks for none.

    They are raw: the log-softmax of the logits as given, in float64. Given what the engine
    computes they say what the model believes, whatever penalty, bias, temperature or filter the
    token was chosen with; so a token can be chosen that is not the most probable one here.

    Args:
        logits: [R, V] float32, the largest of each row that asks finite.
        tokens: the chosen token of each row, R.
        params: one for each row, R.
    """
    return [
        None if request.logprobs is None else _of_row(row, int(token), request.logprobs)
        for row, token, request in zip(logits, tokens, params, strict=True)
    ]


def _of_row(row: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    largest = np.float64(row.max())
    total = np.log(np.exp(row - largest).sum())

    def logprob(of: int) -> float:
        return float(row[of] - largest - total)

    top = np.flatnonzero(top_k_mask(row[None], [count])[0]) if count else np.empty(0, np.int64)
    top = top[np.argsort(-row[top], kind="stable")]
    return TokenLogprobs(
        logprob=logprob(token), top=tuple(Logprob(of, logprob(of)) for of in top.tolist())
    )
