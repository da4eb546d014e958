"""The decode loop without a clock or a thread: requests that begin together, token by token."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.backend import RowSession, Session
from export_grok.errors import NumericsError, RequestError
from export_grok.runtime.batching.answer import Answer
from export_grok.runtime.batching.batch import CHUNK, Batch
from export_grok.runtime.observer import FinishReason
from export_grok.runtime.request import Request, check_room

__all__ = ["Step", "check_decode_steps", "decode", "teacher_forced"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One new token of one row, or its end.

    Attributes:
        row: number of the request.
        token: the new token; None if the row ended by a stop token.
        finished: why the row ended here; None while it goes on.
    """

    row: int
    token: int | None
    finished: FinishReason | None


def decode(
    session: RowSession, requests: Sequence[Request], *, chunk: int = CHUNK
) -> Iterator[Step]:
    """Yield the new tokens of all requests as they come.

    Args:
        session: with as many rows as there are requests; its cache is overwritten.
        requests: what to continue.
        chunk: tokens of a prompt that go through the layers at once.

    Raises:
        NumericsError: the engine gave logits that are no numbers; names row and step.
        RequestError: a prompt does not fit the cache, or the number of rows differs.
    """
    if len(requests) != session.batch:
        raise RequestError(
            f"{len(requests)} requests were given; this session has {session.batch} rows"
        )
    batch = Batch(session, chunk=chunk)
    rows: dict[Answer, int] = {}
    for number, request in enumerate(requests):
        check_room(request, session.max_length, name=f"prompt {number}")
        answer = Answer(request, session.max_length)
        rows[answer] = number
        batch.add(answer)
    while not batch.idle:
        for token in batch.turn().tokens:
            row = rows[token.answer]
            if token.error is not None:
                raise NumericsError(f"row {row}, {token.error}") from token.error
            yield Step(row=row, token=token.token, finished=token.finished)


def teacher_forced(
    session: Session, tokens: NDArray[np.int64], *, decode_steps: int = 0, chunk: int = CHUNK
) -> Iterator[NDArray[np.float32]]:
    """Yield the logits of every position of `tokens` [B, S] in order, as [B, part, V].

    Args:
        session: with B rows; its cache is overwritten.
        tokens: ids.
        decode_steps: so many of the last tokens are fed one at a time.
        chunk: tokens that go through the layers at once before that.

    Raises:
        NumericsError: a logit is no number; names the position.
        RequestError: the tokens do not fit, or `decode_steps` is out of range.
    """
    total = tokens.shape[1]
    check_decode_steps(decode_steps, total)
    prompt = total - decode_steps
    borders = [*range(0, prompt, chunk), *range(prompt, total), total]
    for first, end in itertools.pairwise(borders):
        start = np.full(tokens.shape[0], first, np.int64)
        logits = session.forward_all(tokens[:, first:end], start)
        if not np.isfinite(logits).all():
            row, place = np.argwhere(~np.isfinite(logits).all(axis=-1))[0]
            raise NumericsError(
                f"the logits of row {row} at position {first + place} are not all numbers; "
                "check the weights with quantise-report"
            )
        yield logits


def check_decode_steps(steps: int, tokens: int) -> None:
    """Hold the tokens that are fed one at a time to all there are.

    Raises:
        RequestError: they are more.
    """
    if not 0 <= steps <= tokens:
        raise RequestError(f"{steps} tokens cannot be decoded singly of {tokens}")
