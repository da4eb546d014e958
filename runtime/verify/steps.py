"""What a comparison feeds: rows of different length, in uneven pieces, then token by token.

So every graph is run with a prompt's first piece, with pieces that begin at different places of
different rows, and with single tokens behind histories of different length.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.errors import RequestError

__all__ = ["Step", "faint", "steps_of"]

FAINT = 1e-5


@dataclass(frozen=True, kw_only=True)
class Step:
    """New tokens of all rows that go through the graphs at once.

    Attributes:
        name: e.g. "prefill 1", "decode 3".
        tokens: ids [B, S]; a shorter row is padded on the right.
        start: tokens of each row before these [B].
        length: how many of the S tokens of each row count [B]; may be 0.
        gain: of the residual stream that graphs are fed.
    """

    name: str
    tokens: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    gain: float = 1.0

    @property
    def counts(self) -> NDArray[np.bool_]:
        """Which of the tokens are no padding, [B, S]."""
        counts: NDArray[np.bool_] = np.arange(self.tokens.shape[1]) < self.length[:, np.newaxis]
        return counts

    @property
    def last(self) -> NDArray[np.int64]:
        """The last token of each row that counts, [B]; the first where none does."""
        return np.maximum(self.length - 1, 0)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Position of every token in its row, [B, S]."""
        return self.start[:, np.newaxis] + np.arange(self.tokens.shape[1])


def steps_of(
    rows: Sequence[Sequence[int]], *, decode: int, chunk: int, max_length: int
) -> tuple[Step, ...]:
    """Return the steps that read all rows to their end.

    Args:
        rows: token ids, each with more than `decode`.
        decode: so many of the last tokens of each row come one at a time.
        chunk: tokens of a row that come at once before that.
        max_length: slots of the cache, which padding too must keep to.

    Raises:
        RequestError: a row is too short, or does not fit the cache.
    """
    prompt = np.array([len(row) for row in rows]) - decode
    if prompt.min() < 1 or decode < 0:
        raise RequestError(
            f"rows of {', '.join(str(len(row)) for row in rows)} tokens cannot have {decode} "
            "decoded singly and one or more before them; take longer rows or fewer --tokens"
        )
    if prompt.max() + decode > max_length:
        raise RequestError(
            f"a row of {prompt.max() + decode} tokens does not fit {max_length} slots; take "
            "fewer --tokens"
        )
    steps: list[Step] = []
    done = np.zeros(len(rows), np.int64)
    length = _first(prompt, chunk, max_length)
    while length.any():
        steps.append(_step(f"prefill {len(steps) + 1}", rows, done, length))
        done = done + length
        length = np.minimum(prompt - done, chunk)
    single = np.ones(len(rows), np.int64)
    for number in range(decode):
        steps.append(_step(f"decode {number + 1}", rows, done + number, single))
    return tuple(steps)


def _first(prompt: NDArray[np.int64], chunk: int, max_length: int) -> NDArray[np.int64]:
    """Return how many tokens of each row come first: from there on they begin at different places.

    A row that is ahead takes as much padding as the others have tokens left, and must have slots
    for it: where they are few, the first piece is smaller, down to one token of each row.
    """
    parts = np.arange(1, len(prompt) + 1)
    for size in range(chunk, 0, -1):
        first: NDArray[np.int64] = np.maximum(1, np.minimum(prompt, size) // parts)
        if first.max() + (prompt - first).max() <= max_length:
            break
    return first


def faint(step: Step) -> Step:
    """Return a step of the same tokens with a residual stream so faint that eps decides.

    A norm of what is large hides its eps: 1e-6 in place of 1e-5 is then as small as rounding.
    Here it triples what comes out, behind the sublayers too.
    """
    return dataclasses.replace(step, name="faint", gain=FAINT)


def _step(
    name: str, rows: Sequence[Sequence[int]], start: NDArray[np.int64], length: NDArray[np.int64]
) -> Step:
    tokens = np.zeros((len(rows), int(length.max())), np.int64)
    for row, ids in enumerate(rows):
        first, count = int(start[row]), int(length[row])
        tokens[row, :count] = ids[first : first + count]
    return Step(name=name, tokens=tokens, start=start.copy(), length=length)
