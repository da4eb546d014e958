"""The decode loop: prompts into the cache by chunks, then one token a step for every row."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.backend import Session
from export_grok.errors import NumericsError, RequestError
from export_grok.runtime.params import SamplingParams
from export_grok.runtime.sampling import sample

__all__ = [
    "CHUNK",
    "FinishReason",
    "Request",
    "Step",
    "check_decode_steps",
    "check_requests",
    "decode",
    "teacher_forced",
]

# Tokens of a prompt that go through the layers at once. Weights are read once a chunk.
CHUNK = 256

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: token ids, one or more.
        sampling: how to choose tokens.
        max_new_tokens: longest answer; as long as the cache allows by default.
        stop: ids that end the answer and are not part of it.

    Raises:
        RequestError: the prompt is empty, or a limit below 1.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt has no tokens; give at least one character")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")


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


def decode(session: Session, requests: Sequence[Request], *, chunk: int = CHUNK) -> Iterator[Step]:
    """Yield the new tokens of all requests as they come, row by row within a step.

    Rows of different length share the batch: a shorter one is padded on the right, and what the
    padding leaves in the cache is overwritten before any token may see it.

    Args:
        session: with as many rows as there are requests; its cache is overwritten.
        requests: what to continue.
        chunk: tokens of a prompt that go through the layers at once.

    Raises:
        NumericsError: the engine gave logits that are no numbers; names row and step.
        RequestError: a prompt does not fit the cache, or the number of rows differs.
    """
    check_requests(requests, batch=session.batch, max_length=session.max_length)
    length = np.array([len(request.prompt) for request in requests])
    limit = np.array([_limit(session, request) for request in requests])
    logits = _prefill(session, requests, chunk)
    made = np.zeros(len(requests), np.int64)
    open_rows = np.ones(len(requests), np.bool_)
    tokens = np.zeros((len(requests), 1), np.int64)
    sampling = [request.sampling for request in requests]
    while True:
        # Finished rows stay in, as zeros: so an error counts rows as the caller does.
        logits = np.where(open_rows[:, None], logits, np.float32(0))
        chosen = sample(logits, sampling, made)
        for row in np.flatnonzero(open_rows).tolist():
            token = int(chosen[row])
            if token in requests[row].stop:
                open_rows[row] = False
                yield Step(row=row, token=None, finished="stop")
                continue
            tokens[row] = token
            made[row] += 1
            if made[row] == limit[row]:
                open_rows[row] = False
                yield Step(row=row, token=token, finished="length")
            else:
                yield Step(row=row, token=token, finished=None)
        if not open_rows.any():
            return
        # A finished row runs along at its last place: its slot is free to be overwritten.
        start = np.minimum(length + np.maximum(made, 1) - 1, session.max_length - 1)
        logits = _logits(session, tokens, start, np.zeros(len(requests), np.int64))


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


def check_requests(requests: Sequence[Request], *, batch: int, max_length: int) -> None:
    """Hold requests to the rows and the cache of a session.

    Raises:
        RequestError: a prompt does not fit the cache, or the number of rows differs.
    """
    if len(requests) != batch:
        raise RequestError(f"{len(requests)} requests were given; this session has {batch} rows")
    for number, request in enumerate(requests):
        if len(request.prompt) >= max_length:
            raise RequestError(
                f"prompt {number} has {len(request.prompt)} tokens; a cache of {max_length} takes "
                f"{max_length - 1} and an answer of one: shorten the prompt or raise max_length"
            )


def _limit(session: Session, request: Request) -> int:
    room = session.max_length - len(request.prompt)
    return room if request.max_new_tokens is None else min(room, request.max_new_tokens)


def _prefill(session: Session, requests: Sequence[Request], chunk: int) -> NDArray[np.float32]:
    """Write all prompts into the cache; return the logits of each one's last token, [B, V]."""
    prompts = [request.prompt for request in requests]
    length = np.array([len(prompt) for prompt in prompts])
    logits = np.empty((len(prompts), session.config.vocab_size), np.float32)
    done = np.zeros(len(prompts), np.int64)
    while (done < length).any():
        # No row may be written beyond the cache, padding included.
        width = min(chunk, int((length - done).max()), int(session.max_length - done.max()))
        tokens = np.zeros((len(prompts), width), np.int64)
        taken = np.minimum(length - done, width)
        for row, prompt in enumerate(prompts):
            tokens[row, : taken[row]] = prompt[done[row] : done[row] + taken[row]]
        ending = (taken > 0) & (done + taken == length)
        if ending.any():
            new = _logits(session, tokens, done, np.maximum(taken - 1, 0))
            logits[ending] = new[ending]
        else:
            session.forward(tokens, done, None)
        done = done + taken
    return logits


def _logits(
    session: Session,
    tokens: NDArray[np.int64],
    start: NDArray[np.int64],
    last: NDArray[np.int64],
) -> NDArray[np.float32]:
    logits = session.forward(tokens, start, last)
    if logits is None:
        raise AssertionError("a session gives logits when asked for them")
    return logits
