"""What the int8 codes of a tensor say about it, read once from the first to the last.

The code -128 is no fault: the format does not forbid it.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from export_grok.export.check.findings import Finding, Level, counted, index_of
from export_grok.export.check.zero_runs import ZeroRun, ZeroRuns, hole_finding, words_of
from export_grok.weights import Weight

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["CodeValues"]

# How many codes of a smaller matrix are alike says nothing.
FEW_CODES = 1024
# A tensor with more groups of rows is none of ours, and is taken for one matrix.
MOST_GROUPS = 1 << 16
# A row of more columns is none of ours, and is not held to its scales.
MOST_COLUMNS = 1 << 22

# Codes at the ends of their range beyond one a column and group, which the quantiser puts there.
# Uniformly random bytes have 1.2 % of them, a bell that ends at its largest value fewer. One whose
# scales are half of what they should be has 4.6 %, at a third it has 18 %. To clip so hard may be
# meant; with more than half at the ends nothing is left of the numbers.
SATURATED = 0.05
SATURATED_WRONG = 0.5

# So much is compared at once: it stays in a core's cache.
CACHED = 256 << 10
# Bytes of each block by which matrices are told apart, with the sum of all.
SIGNED = 64 << 10


@dataclass
class _Matrix:
    """What is known of one matrix; a tensor has one for each expert."""

    index: tuple[int, ...]
    empty: bool = True
    at_ends: int = 0
    holes: list[ZeroRun] = dataclasses.field(default_factory=list)
    signature: "_Hash" = dataclasses.field(default_factory=hashlib.sha256)


class CodeValues:
    """Takes the codes of a tensor, block after block."""

    def __init__(
        self, weight: Weight, scales: Callable[[int], NDArray[np.float32] | None]
    ) -> None:
        """Make it for a tensor.

        Args:
            weight: of shape [.., rows, columns].
            scales: from the number of a group of rows, counted through all matrices, to the scale
                of each column; None if they are not known.
        """
        *self._lead, rows, self._columns = (1, *weight.shape)[-max(2, len(weight.shape)) :]
        self._groups = weight.groups if weight.groups and rows % weight.groups == 0 else 1
        if math.prod(self._lead) * self._groups > MOST_GROUPS:
            rows *= math.prod(self._lead)
            self._lead, self._groups = [], 1
        self._weight = weight
        self._scales = scales
        self._size = rows * self._columns
        self._at = 0
        self._runs = ZeroRuns()
        self._matrices: list[_Matrix] = []
        self._unscaled = np.empty(0, np.intp)  # columns whose scale is 0, in the group at hand
        self._used = np.empty(0, np.bool_)  # which of these have codes that are not
        self._contradicted = 0  # how many these are in all groups
        self._contradiction: tuple[int, ...] = ()  # the scale of the first
        self._scratch = np.empty(CACHED, np.uint8), np.empty(CACHED, np.bool_)

    def cuts(self, most: int) -> Iterator[int]:
        """Yield the lengths of the blocks to feed: whole rows of one group, up to `most` bytes."""
        group = self._size // self._groups
        step = most // self._columns * self._columns or most
        for _ in range(self._weight.size // group):
            for first in range(0, group, step):
                yield min(step, group - first)

    def feed(self, block: NDArray[np.uint8]) -> None:
        """Take the next codes as bytes, a block of `cuts`."""
        if self._at % self._size == 0:
            number = self._at // self._size
            self._matrices.append(_Matrix(index=index_of(number, self._lead)))
        group, into = divmod(self._at, self._size // self._groups)
        if into == 0:
            self._begin_group(group)
        matrix = self._matrices[-1]
        if self._runs.feed(self._weight.offset + self._at, block):
            matrix.empty = False
            matrix.at_ends += self._at_ends(block)
            self._compare(block, group)
        matrix.signature.update(block[:SIGNED].data)
        matrix.signature.update(words_of(block).sum().tobytes())
        self._at += len(block)
        if self._at % self._size == 0:
            self._runs.end(self._weight.offset + self._at)
            matrix.holes, self._runs.found = self._runs.found, []

    def findings(self) -> Iterator[Finding]:
        """Yield what was found, once all codes were fed."""
        empty = [matrix for matrix in self._matrices if matrix.empty]
        if len(empty) == len(self._matrices):
            yield Finding.of(self._weight, "wrong", "zeros", "is all zeros")
            return
        if empty:
            yield Finding.of(
                self._weight,
                "wrong",
                "zeros",
                f"{self._named(empty)} all zeros",
                count=len(empty),
                index=empty[0].index,
            )
        holes = [run for matrix in self._matrices if not matrix.empty for run in matrix.holes]
        if holes:
            yield hole_finding(self._weight, holes)
        if self._contradicted:
            yield Finding.of(
                self._weight,
                "wrong",
                "scale",
                f"has codes that are not 0 in {counted(self._contradicted, 'column')} whose scale "
                f"is 0, the first is scale {list(self._contradiction)}",
                count=self._contradicted,
                index=self._contradiction,
            )
        if self._size >= FEW_CODES:
            yield from self._saturated("wrong", SATURATED_WRONG, 1.0)
            yield from self._saturated("doubtful", SATURATED, SATURATED_WRONG)

    def signatures(self) -> dict[tuple[int, ...], bytes]:
        """Return what tells each matrix from others, but for small ones and those of zeros."""
        if self._size < FEW_CODES:
            return {}
        return {m.index: m.signature.digest() for m in self._matrices if not m.empty}

    def _begin_group(self, group: int) -> None:
        scales = self._scales(group) if self._columns <= MOST_COLUMNS else None
        # A row of nothing but zeros is told as such.
        known = scales is not None and scales.any()
        self._unscaled = np.flatnonzero(scales == 0) if known else np.empty(0, np.intp)
        self._used = np.zeros(len(self._unscaled), np.bool_)

    def _compare(self, block: NDArray[np.uint8], group: int) -> None:
        """Look for codes that are not 0 in columns whose scale is."""
        if not len(self._unscaled) or len(block) % self._columns:
            return
        rows = block.reshape(-1, self._columns)
        new = rows[:, self._unscaled].any(axis=0) & ~self._used
        if new.any() and not self._contradicted:
            matrix, of_matrix = divmod(group, self._groups)
            column = int(self._unscaled[new][0])
            self._contradiction = (*index_of(matrix, self._lead), of_matrix, column)
        self._used |= new
        self._contradicted += int(np.count_nonzero(new))

    def _at_ends(self, block: NDArray[np.uint8]) -> int:
        """Return how many codes are 127, -128 or -127, which as bytes follow each other."""
        count = 0
        for first in range(0, len(block), CACHED):
            part = block[first : first + CACHED]
            shifted, ends = (scratch[: len(part)] for scratch in self._scratch)
            np.subtract(part, 127, out=shifted)
            np.less_equal(shifted, 2, out=ends)
            count += int(np.count_nonzero(ends))
        return count

    def _saturated(self, level: Level, above: float, most: float) -> Iterator[Finding]:
        meant = self._columns * self._groups
        found = [m for m in self._matrices if above < (m.at_ends - meant) / self._size <= most]
        if found:
            share = max(matrix.at_ends for matrix in found) / self._size
            yield Finding.of(
                self._weight,
                level,
                "saturated",
                f"{self._named(found)} saturated, up to {share:.1%} of the codes are at -128, "
                "-127 or 127",
                count=sum(matrix.at_ends for matrix in found),
                index=found[0].index,
            )

    def _named(self, matrices: Sequence[_Matrix]) -> str:
        """Return which of the matrices they are, and a verb."""
        if not self._lead:
            return "is"
        named = ", ".join(str(list(matrix.index)) for matrix in matrices)
        return f"{named} of {len(self._matrices)} {'is' if len(matrices) == 1 else 'are'}"
