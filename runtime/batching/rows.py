"""What each row of the cache holds, and who has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEAST_COPY", "Rows", "Taken"]

# Fewer tokens are computed with the rest of the prompt sooner than copied.
LEAST_COPY = 16


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A row for a prompt.

    Attributes:
        row: that is the prompt's now.
        cached: how many of its first tokens a row holds already.
        source: which row that is.
    """

    row: int
    cached: int
    source: int


class Rows:
    """The rows of a cache. One that is let go keeps what it holds until another prompt takes it.

    Args:
        batch: rows there are, B.
        max_length: tokens of each, T.
    """

    def __init__(self, batch: int, max_length: int) -> None:
        self._tokens = np.zeros((batch, max_length), np.int64)
        self._length = np.zeros(batch, np.int64)
        self._taken = np.zeros(batch, np.bool_)
        self._let_go = np.zeros(batch, np.int64)  # when; 0 for never
        self._clock = 0

    @property
    def free(self) -> int:
        """How many rows nobody has."""
        return int(np.count_nonzero(~self._taken))

    @property
    def used_tokens(self) -> int:
        """Tokens in rows that somebody has."""
        return int(self._length[self._taken].sum())

    @property
    def kept_tokens(self) -> int:
        """Tokens in rows that nobody has."""
        return int(self._length[~self._taken].sum())

    def take(self, prompt: Sequence[int]) -> Taken:
        """Return a free row for a prompt, which is the prompt's from now on.

        A free row whose tokens all begin the prompt is continued. If another row has much more in
        common with it, that is to be copied into the row that was let go first, so that both
        beginnings are there for prompts to come; a row is cut short where it is only if no other
        is free. At least one token of the prompt is left to compute: its logits are needed.
        """
        common = self._common(np.array(prompt[:-1], np.int64))
        free = np.flatnonzero(~self._taken)
        continued = np.where(common[free] == self._length[free], common[free], 0)
        row = int(free[np.argmax(continued)])
        source = int(np.argmax(common))
        if common[source] - continued.max() >= LEAST_COPY:
            others = free[free != source]
            row = self._oldest(others) if others.size else source
        elif not continued.any():
            row = source = self._oldest(free)
        else:
            source = row
        cached = int(common[source])
        self._taken[row] = True
        self._tokens[row, :cached] = prompt[:cached]
        self._length[row] = cached
        return Taken(row=row, cached=cached, source=source)

    def write(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Take note that a row holds `tokens` from `start` on, and nothing behind them."""
        end = start + len(tokens)
        self._tokens[row, start:end] = tokens
        self._length[row] = end

    def let_go(self, row: int, *, keep: bool = True) -> None:
        """Take note that a row is free; what it holds is kept, or is of no use."""
        if not keep:
            self._length[row] = 0
        self._clock += 1
        self._let_go[row] = self._clock
        self._taken[row] = False

    def _oldest(self, rows: NDArray[np.int64]) -> int:
        """Return which of some rows was let go first, or never used."""
        return int(rows[np.argmin(self._let_go[rows])])

    def _common(self, prompt: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of its first tokens each row has in common with a prompt, [B]."""
        width = min(len(prompt), self._tokens.shape[1])
        same = np.zeros((len(self._tokens), width + 1), np.bool_)  # none behind the prompt
        same[:, :width] = self._tokens[:, :width] == prompt[:width]
        common: NDArray[np.int64] = np.minimum(np.argmin(same, axis=-1), self._length)
        return common
