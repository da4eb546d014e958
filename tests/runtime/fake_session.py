"""A session without a model: its logits depend on every token before, so a wrong one is seen."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig

__all__ = ["FakeSession", "LogitsOf", "broken_after", "logits_after"]

EMPTY = -1

LogitsOf = Callable[[Sequence[int], int], NDArray[np.float32]]


def logits_after(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
    """Return logits that differ with every change of any token, and of their number."""
    seed = [token + 1 for token in tokens]
    return np.random.default_rng(seed).standard_normal(vocabulary).astype(np.float32)


def broken_after(length: int, begins: int, value: float = np.nan) -> LogitsOf:
    """Return logits with one `value` where a text that begins so has so many tokens, or more."""

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        logits = logits_after(tokens, vocabulary)
        if tokens[0] == begins and len(tokens) >= length:
            logits[3] = value
        return logits

    return logits_of


class FakeSession:
    """A fake of `engines.backend.RowSession`: it keeps tokens in place of keys and values.

    Attributes:
        cache: the token in each slot [B, T]; -1 where none was written.
        calls: how many tokens each call brought.
        named: the rows of each call, as they were given.
        copies: the arguments of each copy.
    """

    def __init__(
        self,
        config: GrokConfig,
        *,
        batch: int,
        max_length: int,
        prefill_rows: int | None = None,
        logits_of: LogitsOf = logits_after,
    ) -> None:
        self.config = config
        self.batch = batch
        self.max_length = max_length
        self.prefill_rows = prefill_rows or batch
        self.cache = np.full((batch, max_length), EMPTY, np.int64)
        self.calls: list[int] = []
        self.named: list[list[int]] = []
        self.copies: list[tuple[int, int, int]] = []
        self._logits_of = logits_of

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32] | None:
        """Keep the tokens; return logits that follow from all tokens up to `last`."""
        if rows is None:
            rows = np.arange(self.batch)
        self._write(tokens, start, rows)
        if last is None:
            return None
        assert last.shape == rows.shape
        assert ((last >= 0) & (last < tokens.shape[1])).all()
        return np.stack(
            [self._row(row, end) for row, end in zip(rows, start + last + 1, strict=True)]
        )

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Keep the tokens; return the logits of each."""
        self._write(tokens, start, np.arange(self.batch))
        ends = np.arange(1, tokens.shape[1] + 1)
        return np.stack(
            [[self._row(row, first + end) for end in ends] for row, first in enumerate(start)]
        )

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens of a row those of another."""
        assert source != target
        assert {source, target} <= set(range(self.batch))
        assert 1 <= length <= self.max_length
        assert EMPTY not in self.cache[source, :length]
        self.cache[target, :length] = self.cache[source, :length]
        self.copies.append((source, target, length))

    def _write(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> None:
        count, width = tokens.shape
        assert rows.shape == (count,)
        assert count > 0
        assert len(set(rows.tolist())) == count
        assert set(rows.tolist()) <= set(range(self.batch))
        assert width > 0
        assert start.shape == (count,)
        assert start.min() >= 0
        assert start.max() + width <= self.max_length
        assert tokens.min() >= 0
        assert tokens.max() < self.config.vocab_size
        for row, first, new in zip(rows, start, tokens, strict=True):
            assert EMPTY not in self.cache[row, :first]  # no gap: these were computed before
            self.cache[row, first : first + width] = new
        self.calls.append(width)
        self.named.append(rows.tolist())

    def _row(self, row: int, end: int) -> NDArray[np.float32]:
        return self._logits_of(self.cache[row, :end].tolist(), self.config.vocab_size)
