"""Where in the cache each row lies: rows of one call side by side, by as few moves as may be.

A graph runs over a range of places. One that it runs over for nothing would cost as much as any
other (it reads two more experts a layer), so rows that are asked for together and lie apart are
moved: each that lies outside the range changes places with one inside that is not asked for.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Places", "Swap"]


@dataclass(frozen=True)
class Swap:
    """Two places that change what they hold.

    Attributes:
        places: both.
        lengths: tokens that each holds before.
    """

    places: tuple[int, int]
    lengths: tuple[int, int]


class Places:
    """The place of every row, and the tokens that it holds.

    Rows are moved to either end of the cache, never to its middle: so the rest lies side by side
    too. Two groups of rows that take turns, those that get a prompt and those that get an answer,
    are at the two ends after a turn or two, and then nothing moves.

    Args:
        rows: how many there are, each at first at the place of its number.
    """

    def __init__(self, rows: int) -> None:
        self._row = np.arange(rows)  # at each place
        self._length = np.zeros(rows, np.int64)  # of each row
        self._served = np.zeros(rows, np.bool_)  # the rows of the call before

    def of(self, row: int) -> int:
        """Return the place of a row."""
        return int(np.flatnonzero(self._row == row)[0])

    def holds(self, rows: NDArray[np.int64], lengths: NDArray[np.int64] | int) -> None:
        """Note how many tokens rows hold from now on."""
        self._length[rows] = lengths

    def gather(self, rows: NDArray[np.int64]) -> tuple[int, list[Swap]]:
        """Have rows lie side by side, in any order.

        Args:
            rows: which, one or more, each once.

        Returns:
            Their first place, and what has to change places for that, pair by pair: no place is
            in two pairs.
        """
        asked = np.zeros(len(self._row), np.bool_)
        asked[rows] = True
        first, swaps = self._gather(asked)
        self._served = asked
        return first, swaps

    def order(self, first: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each place from `first` on which of the rows lies there, as an index."""
        index = np.empty(len(self._row), np.int64)
        index[rows] = np.arange(len(rows))
        return index[self._row[first : first + len(rows)]]

    def _gather(self, asked: NDArray[np.bool_]) -> tuple[int, list[Swap]]:
        count = int(asked.sum())
        where = np.flatnonzero(asked[self._row])
        first = int(where[0])
        if where[-1] - first == count - 1:
            return first, []
        first = min((0, len(self._row) - count), key=lambda end: self._cost(asked, end, count))
        inside = np.arange(first, first + count)
        leaving = inside[~asked[self._row[inside]]]
        coming = np.setdiff1d(where, inside)
        swaps = []
        for pair in zip(leaving.tolist(), coming.tolist(), strict=True):
            one, other = self._row[list(pair)].tolist()
            swaps.append(Swap(pair, (int(self._length[one]), int(self._length[other]))))
            self._row[list(pair)] = other, one
        return first, swaps

    def _cost(self, asked: NDArray[np.bool_], first: int, count: int) -> tuple[int, int]:
        """Return what it costs to have the rows at places from `first` on.

        First of all, how many of the call before are driven out: they would be back at the next.
        Then how many tokens are moved.
        """
        inside = np.zeros(len(asked), np.bool_)
        inside[self._row[first : first + count]] = True
        leaving, coming = inside & ~asked, asked & ~inside
        return int((leaving & self._served).sum()), int(self._length[leaving | coming].sum())
