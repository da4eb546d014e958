"""Float matrices to int8 with bfloat16 scales, one for each output column and group of rows.

    scale[r, n] = bfloat16, rounded up, of max |w[k, n]| / 127 over the rows k of group r
    weight[k, n] = round(w[k, n] / scale[k // (K / R), n]), halves to even

A scale that is rounded up never makes a weight larger than 127, so nothing is cut off. Shape
letters are those of `export.model`.

Weights that were int8 before come back as they were: where the values of a group are whole
multiples of one of the scales about that one, as exactly as bfloat16 can say it, that scale is
taken. Codes and scales are then exactly those of the source if it held int8 times a bfloat16
scale, in float32, or rounded to bfloat16 or to a float16 that is not subnormal, and the largest
value of a group was 126, 127 or -128 scales. In the columns of a release it was: each reached 127
before its scale was rounded. Of a group with few values, 8 say, two scales may tell the same
within bfloat16; then it can be the other.
"""

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from export_grok.errors import CheckpointError
from export_grok.export.quantisation import QuantisedTensor

__all__ = ["LARGEST", "Quantiser", "check_finite"]

LARGEST = 127

# Half a unit in the last place of bfloat16, and what dividing in float32 adds.
_BFLOAT16_ERROR = 2.0**-8 * (1 + 2.0**-12)
# Steps of bfloat16 from the scale of the largest value: 126 to 128 of them, itself rounded.
_NEIGHBOURS = (0, -1, 1, -2, 2, -3, 3)
# Values of a group, spread over it, that are to be whole multiples.
_PROBES = 64
# int8 codes that are moved as one word when a matrix is transposed.
_WORD = np.dtype(np.uint64).itemsize


class Quantiser:
    """Quantises matrices of one shape one after the other, by some output columns at a time.

    Attributes:
        codes: int8 [K, N], as far as columns of a matrix were added.
        scales: bfloat16 [R, N].
    """

    def __init__(self, rows: int, columns: int, groups: int, *, restore: bool = False) -> None:
        """Take matrices [K, N] of `rows` and `columns`.

        Args:
            rows: K, a multiple of `groups`.
            columns: N.
            groups: R, groups of rows that have scales of their own.
            restore: bring back the codes and scales of values that were int8 before.
        """
        self.codes = np.empty((rows, columns), np.int8)
        self.scales = np.empty((groups, columns), ml_dtypes.bfloat16)
        self._restore = restore
        self._scratch = np.empty((0, rows), np.float32)
        self._values, self._saturated = 0, 0
        self._square, self._difference, self._largest = 0.0, 0.0, 0.0
        self._scale_min, self._scale_max = math.inf, 0.0

    def add(self, first: int, values: NDArray[np.float32]) -> None:
        """Quantise columns from number `first` on.

        Args:
            first: number of the first column.
            values: [n, K], a column of the matrix in each row; they are overwritten.

        Raises:
            CheckpointError: a value is no number, or infinite; its place is told.
        """
        count, rows = values.shape
        groups = self.scales.shape[0]
        grouped = values.reshape(count, groups, rows // groups)
        high, low = grouped.max(-1), grouped.min(-1)
        largest = np.abs(np.maximum(high, -low))  # which of 0 and -0 is the larger is open
        if not np.isfinite(largest).all():
            check_finite(values, first)
        scales = _rounded_up(largest / np.float32(LARGEST))
        if self._restore:
            # A neighbour of the largest numbers is infinite, and then no multiple is found.
            with np.errstate(over="ignore", invalid="ignore"):
                scales = _restored(grouped, low, high, scales)
        self.scales[:, first : first + count] = scales.T
        # A column of zeros is zero by any scale.
        divisor = np.where(scales == 0, ml_dtypes.bfloat16(1), scales).astype(np.float32)
        steps = np.divide(grouped, divisor[..., None], out=grouped)
        if self._scratch.shape[0] < count:  # memory that is new to the process takes long
            self._scratch = np.empty((count, rows), np.float32)
        rounded = np.rint(steps, out=self._scratch[:count].reshape(steps.shape))
        _transpose(rounded.reshape(count, rows), self.codes, first)
        self._measure(steps, rounded, scales.astype(np.float32))

    def _measure(
        self,
        steps: NDArray[np.float32],
        rounded: NDArray[np.float32],
        scales: NDArray[np.float32],
    ) -> None:
        """Add what became of groups of values [n, R, k], in steps of their scales [n, R]."""
        squares = np.square(scales, dtype=np.float64)
        self._values += steps.size
        self._square += float((np.vecdot(steps, steps) * squares).sum())
        error = np.subtract(steps, rounded, out=steps)
        self._difference += float((np.vecdot(error, error) * squares).sum())
        largest = np.maximum(error.max(-1), -error.min(-1)) * scales
        self._largest = max(self._largest, float(largest.max()))
        self._saturated += int(np.count_nonzero(np.abs(rounded, out=rounded) >= LARGEST))
        self._scale_min = min(self._scale_min, float(scales.min()))
        self._scale_max = max(self._scale_max, float(scales.max()))

    def error(self, name: str) -> QuantisedTensor:
        """Return what quantising did to all the matrices, as those of the tensor `name`.

        Args:
            name: without `.weight`.
        """
        return QuantisedTensor(
            name=name,
            values=self._values,
            scale_min=self._scale_min,
            scale_max=self._scale_max,
            saturated=self._saturated / self._values,
            relative_error=math.sqrt(self._difference / self._square) if self._square else 0.0,
            max_error=self._largest,
        )


def check_finite(values: NDArray[np.float32], first: int) -> None:
    """Check that there are only finite numbers in rows from number `first` on.

    Raises:
        CheckpointError: one is not; its text says which, and goes behind the name of the tensor.
    """
    finite = np.isfinite(values)
    if not finite.all():
        row, *rest = place = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise CheckpointError(
            f"holds {values[place]} at {[first + row, *rest]}; "
            "weights are finite numbers: get it again"
        )


def _rounded_up(x: NDArray[np.float32]) -> NDArray[ml_dtypes.bfloat16]:
    """Return the smallest bfloat16 that is at least x, for x >= 0."""
    near = x.astype(ml_dtypes.bfloat16)
    bits = near.view(np.uint16)
    return np.where(near.astype(np.float32) < x, bits + 1, bits).astype(np.uint16).view(near.dtype)


def _restored(
    grouped: NDArray[np.float32],
    low: NDArray[np.float32],
    high: NDArray[np.float32],
    scales: NDArray[ml_dtypes.bfloat16],
) -> NDArray[ml_dtypes.bfloat16]:
    """Return the scales that the groups [n, R, k] are whole multiples of, if any, else `scales`.

    That is seen by a probe. A group that only looks so is quantised no worse: of its values none
    is cut off, and each is within half of a step that is 2% larger at the most.
    """
    probe = np.ascontiguousarray(grouped[..., :: -(-grouped.shape[-1] // _PROBES)])
    chosen, least = scales.copy(), np.full(scales.shape, np.inf, np.float32)
    bits = scales.view(np.uint16).astype(np.int32)
    for steps in _NEIGHBOURS:
        # Next to zero there is no scale that could be a divisor.
        candidate = np.maximum(bits + steps, 1).astype(np.uint16).view(scales.dtype)
        divisor = candidate.astype(np.float32)
        inside = (np.rint(low / divisor) >= -128) & (np.rint(high / divisor) <= LARGEST)
        values = probe / divisor[..., None]
        rounded = np.rint(values)
        error = values - rounded
        whole = (np.abs(error) <= _BFLOAT16_ERROR * np.abs(rounded)).all(-1)
        distance = np.vecdot(error, error) * divisor * divisor
        better = inside & whole & (distance < least)
        chosen, least = np.where(better, candidate, chosen), np.where(better, distance, least)
    return np.where(scales == 0, scales, chosen)


def _transpose(rounded: NDArray[np.float32], codes: NDArray[np.int8], first: int) -> None:
    """Write whole numbers [n, K] into columns `first` to `first + n` of `codes` [K, N]."""
    count = len(rounded)
    if count % _WORD or first % _WORD or codes.shape[1] % _WORD:
        codes[:, first : first + count] = rounded.astype(np.int8).T
        return
    # Columns go in words of 8: byte by byte, copying would take most of the time. The bytes of two
    # columns make words of 2, two of these words of 4, and so on; the first column's byte is low.
    words: NDArray[Any] = rounded.astype(np.int8).view(np.uint8)
    for wider in (np.uint16, np.uint32, np.uint64):
        high = words[1::2].astype(wider)
        np.left_shift(high, 8 * words.itemsize, out=high)
        words = np.bitwise_or(high, words[::2], out=high)
    codes.view(np.uint64)[:, first // _WORD : (first + count) // _WORD] = words.T
