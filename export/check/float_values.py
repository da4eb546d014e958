"""What the float values of a tensor say about it, read once from the first to the last.

A negative scale is no fault: the format does not forbid it.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from export_grok.export.check.findings import Finding, Kind, Level, counted, index_of
from export_grok.export.check.zero_runs import ZeroRuns, hole_finding
from export_grok.weights import NUMPY_DTYPES, Weight

__all__ = ["FloatValues"]

# A trained matrix has scales of about 1e-3. One bit that flipped at the top of its exponent, or
# bytes that were swapped, make 1e30 of it.
LARGEST_SCALE = 1e4
# Some processors take a smaller one, a denormal, for 0.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)


class _Counted:
    """How many values are of a kind, and which is the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0

    def add(self, mask: NDArray[np.bool_], at: int) -> None:
        """Count where `mask` is true; it begins with value `at`."""
        count = int(np.count_nonzero(mask))
        if count and not self.count:
            self.first = at + int(np.argmax(mask))
        self.count += count


class FloatValues:
    """Takes the values of a float tensor, block after block."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._dtype = NUMPY_DTYPES[weight.dtype]
        self._columns = weight.shape[-1] if weight.shape else 1
        self._scales = weight.name.rpartition(".")[2] == "scales"
        self._at = 0
        self._empty = True
        self._runs = ZeroRuns()
        self._nan, self._infinite, self._strange = _Counted(), _Counted(), _Counted()
        self._large, self._small, self._zero_rows = _Counted(), _Counted(), _Counted()

    def cuts(self, most: int) -> Iterator[int]:
        """Yield the lengths of the blocks to feed: whole rows, up to `most` bytes."""
        row = self._columns * self._dtype.itemsize
        step = most // row * row or most // self._dtype.itemsize * self._dtype.itemsize
        for first in range(0, self._weight.nbytes, step):
            yield min(step, self._weight.nbytes - first)

    def feed(self, block: NDArray[np.uint8]) -> None:
        """Take the next values as bytes, a block of `cuts`."""
        offset = self._weight.offset + self._at * self._dtype.itemsize
        self._empty &= not self._runs.feed(offset, block)
        values = block.view(self._dtype).astype(np.float32, copy=False)
        with np.errstate(all="ignore"):
            if not np.isfinite(values.sum()):  # quicker than to look at each
                self._nan.add(np.isnan(values), self._at)
                self._infinite.add(np.isinf(values), self._at)
                self._strange.add(np.isnan(values) | np.isinf(values), self._at)
            if self._scales:
                self._feed_scales(values)
        self._at += len(values)
        if self._at == self._weight.size:
            self._runs.end(self._weight.offset + self._weight.nbytes)

    def findings(self) -> Iterator[Finding]:
        """Yield what was found, once all values were fed."""
        if self._empty:
            yield Finding.of(self._weight, "wrong", "zeros", "is all zeros")
            return
        if self._strange.count:
            kinds = [
                f"{found.count:,} {name}"
                for name, found in (("NaN", self._nan), ("infinite", self._infinite))
                if found.count
            ]
            text = f"{' and '.join(kinds)} of {self._weight.size:,} values"
            yield self._found("wrong", "nan", text, self._strange)
        if self._large.count:
            text = f"{counted(self._large.count, 'scale')} above {LARGEST_SCALE:g}"
            yield self._found("wrong", "scale", text, self._large)
        if self._small.count:
            text = f"{counted(self._small.count, 'scale')} so small that some processors read 0"
            yield self._found("doubtful", "scale", text, self._small)
        if self._scales:
            yield from self._zero_rows_of_scales()
        else:
            yield from self._holes()

    def _feed_scales(self, scales: NDArray[np.float32]) -> None:
        size = np.abs(scales)
        self._large.add((size > LARGEST_SCALE) & np.isfinite(size), self._at)
        self._small.add((size > 0) & (size < SMALLEST_SCALE), self._at)
        if len(scales) % self._columns == 0:
            rows = scales.reshape(-1, self._columns)
            self._zero_rows.add(np.count_nonzero(rows, axis=1) == 0, self._at // self._columns)

    def _zero_rows_of_scales(self) -> Iterator[Finding]:
        count = self._zero_rows.count
        if count:
            shape = self._weight.shape[:-1] or (1,)
            index = index_of(self._zero_rows.first, shape)
            yield Finding.of(
                self._weight,
                "wrong",
                "zeros",
                f"{counted(count, 'row')} of {math.prod(shape):,} all zeros, the first {[*index]}",
                count=count,
                index=index,
            )

    def _holes(self) -> Iterator[Finding]:
        row, start = self._columns * self._dtype.itemsize, self._weight.offset
        # The low bytes of the value that ends a run may be zeros too.
        rows = [
            run
            for run in self._runs.found
            if (run.start - start) % row == 0 and (run.end - start) % row < self._dtype.itemsize
        ]
        holes = [run for run in self._runs.found if run not in rows]
        if holes:
            yield hole_finding(self._weight, holes)
        if rows:
            # An embedding may have entries that no text of the training ever asked for.
            first = (rows[0].start - start) // row
            count = sum(run.end - run.start for run in rows) // row
            yield Finding.of(
                self._weight,
                "doubtful",
                "zeros",
                f"{counted(count, 'row')} all zeros, the first {[first]}: never trained, or lost",
                count=count,
                index=(first,),
                offset=rows[0].start,
            )

    def _found(self, level: Level, kind: Kind, text: str, found: _Counted) -> Finding:
        index = index_of(found.first, self._weight.shape)
        return Finding.of(
            self._weight,
            level,
            kind,
            f"{text}, the first at {[*index]}",
            count=found.count,
            index=index,
            offset=self._weight.offset + found.first * self._dtype.itemsize,
        )
