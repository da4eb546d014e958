"""What every session asks of its arguments: checked before anything is written."""

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.engines.backend import Session
from export_grok.errors import RequestError

__all__ = ["check_tokens", "check_vocabulary", "checked_last"]


def check_tokens(session: Session, tokens: NDArray[np.int64], start: NDArray[np.int64]) -> None:
    """Hold new tokens [B, S] and their places [B] to the session's rows, cache and vocabulary.

    Raises:
        RequestError: a shape differs, the tokens do not fit the cache, or are not of the
            vocabulary.
    """
    if tokens.ndim != 2 or tokens.shape[0] != session.batch or not tokens.size:
        raise RequestError(
            f"tokens have shape {tokens.shape}; this session takes [{session.batch}, 1 or more]"
        )
    if start.shape != (session.batch,) or int(start.min()) < 0:
        raise RequestError(
            f"start is {start.tolist()}, shape {start.shape}; "
            f"this session takes [{session.batch}] numbers, 0 or more"
        )
    end = int(start.max()) + tokens.shape[1]
    if end > session.max_length:
        raise RequestError(
            f"{end} tokens do not fit the cache of {session.max_length}; "
            "shorten the prompt or open the engine with a larger max_length"
        )
    check_vocabulary(session.config, tokens)


def check_vocabulary(config: GrokConfig, tokens: NDArray[np.int64]) -> None:
    """Hold tokens, one or more, to the vocabulary of a model.

    Raises:
        RequestError: some are not of it.
    """
    vocabulary = config.vocab_size
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise RequestError(
            f"token ids run from {tokens.min()} to {tokens.max()}; "
            f"this model knows 0 to {vocabulary - 1}"
        )


def checked_last(
    session: Session, last: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return `last` [B] as a head is bound to it: int64, without gaps.

    Raises:
        RequestError: its shape differs, or it is none of the S tokens of a row.
    """
    width = tokens.shape[-1] if tokens.ndim else 0
    inside = last.size and int(last.min()) >= 0 and int(last.max()) < width
    if last.shape != (session.batch,) or not inside:
        raise RequestError(
            f"last is {last.tolist()}, shape {last.shape}; "
            f"this session takes [{session.batch}] numbers, 0 to {width - 1}"
        )
    return np.ascontiguousarray(last, np.int64)
