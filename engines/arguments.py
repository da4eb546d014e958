"""What every session asks of its arguments: checked before anything is written."""

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.engines.backend import Session
from export_grok.errors import RequestError

__all__ = ["check_copy", "check_tokens", "check_vocabulary", "checked_last", "checked_rows"]


def checked_rows(session: Session, rows: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the rows that a call is about [R]: all of the session's if none are named.

    Raises:
        RequestError: one is none of the session's, or is named twice.
    """
    if rows is None:
        return np.arange(session.batch)
    inside = rows.size and int(rows.min()) >= 0 and int(rows.max()) < session.batch
    if rows.ndim != 1 or not inside or len(set(rows.tolist())) != len(rows):
        raise RequestError(
            f"rows is {rows.tolist()}; name one or more of the session's, "
            f"0 to {session.batch - 1}, each once"
        )
    return rows.astype(np.int64)


def check_tokens(
    session: Session,
    tokens: NDArray[np.int64],
    start: NDArray[np.int64],
    rows: NDArray[np.int64] | None = None,
) -> None:
    """Hold new tokens [R, S] and their places [R] to the rows, the cache and the vocabulary.

    Args:
        session: that they are for.
        tokens: to be written.
        start: where each row's begin.
        rows: which rows these are, checked [R]; all of the session's by default.

    Raises:
        RequestError: a shape differs, the tokens do not fit the cache, or are not of the
            vocabulary.
    """
    count = session.batch if rows is None else len(rows)
    if tokens.ndim != 2 or tokens.shape[0] != count or not tokens.size:
        raise RequestError(
            f"tokens have shape {tokens.shape}; {_takes(session, count)} [{count}, 1 or more]"
        )
    if start.shape != (count,) or int(start.min()) < 0:
        raise RequestError(
            f"start is {start.tolist()}, shape {start.shape}; "
            f"{_takes(session, count)} [{count}] numbers, 0 or more"
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
    session: Session,
    last: NDArray[np.int64],
    tokens: NDArray[np.int64],
    rows: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return `last` [R] as a head is bound to it: int64, without gaps.

    Args:
        session: that it is for.
        last: which of a row's tokens.
        tokens: to be written.
        rows: which rows these are, checked [R]; all of the session's by default.

    Raises:
        RequestError: its shape differs, or it is none of the S tokens of a row.
    """
    count = session.batch if rows is None else len(rows)
    width = tokens.shape[-1] if tokens.ndim else 0
    inside = last.size and int(last.min()) >= 0 and int(last.max()) < width
    if last.shape != (count,) or not inside:
        raise RequestError(
            f"last is {last.tolist()}, shape {last.shape}; "
            f"{_takes(session, count)} [{count}] numbers, 0 to {width - 1}"
        )
    return np.ascontiguousarray(last, np.int64)


def check_copy(session: Session, source: int, target: int, length: int) -> None:
    """Hold the arguments of a copy from row to row to a session.

    Raises:
        RequestError: a row is none of the session's, both are one, or the cache is shorter.
    """
    if not {source, target} <= set(range(session.batch)) or source == target:
        raise RequestError(
            f"row {source} cannot be copied to row {target}; "
            f"name two of the session's, 0 to {session.batch - 1}"
        )
    if not 1 <= length <= session.max_length:
        raise RequestError(
            f"{length} tokens cannot be copied; a row of this cache has 1 to {session.max_length}"
        )


def _takes(session: Session, count: int) -> str:
    return "this session takes" if count == session.batch else f"{count} of its rows take"
