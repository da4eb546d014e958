"""A whole tensor of another layout, joined from the parts of ranks, its rows read as float32."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.errors import CheckpointError
from export_grok.export.layouts.source_tensor import RowReader, SourceTensor, widen

__all__ = ["BLOCK", "Matrix", "Part", "check_equal"]

# Rows and columns of a block that has one scale of a `weight_scale_inv`.
BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor in a file, with the scales its values are multiplied by.

    Attributes:
        tensor: [n, k], or [n].
        scales: one for all, [n] or [n, 1] for the rows, or for blocks.
        blocks: `scales` are [ceil(n / 128), ceil(k / 128)], one for each block of 128 by 128.
    """

    tensor: SourceTensor
    scales: SourceTensor | None = None
    blocks: bool = False

    @property
    def files(self) -> set[str]:
        """Names of the files it is read from."""
        return {t.weight.file for t in (self.tensor, self.scales) if t is not None}

    def read(self, reader: RowReader, first: int, out: NDArray[np.float32]) -> None:
        """Write rows from number `first` on to `out`, as many as it has."""
        widen(reader.rows(self.tensor, first, len(out)), out)
        if self.scales is None:
            return
        begin, end = first, first + len(out)
        if self.blocks:
            begin, end = begin // BLOCK, -(-end // BLOCK)
        elif self.scales.weight.size == 1:
            begin, end = 0, 1
        stored = reader.rows(self.scales, begin, end - begin)
        scales: NDArray[np.float32] = np.empty(stored.shape, np.float32)
        widen(stored, scales)
        if self.blocks:
            scales = scales.repeat(BLOCK, axis=0)[first - begin * BLOCK :][: len(out)]
            scales = scales.repeat(BLOCK, axis=1)[:, : out.shape[1]]
        else:
            scales = scales.reshape(-1, 1)
        np.multiply(out, scales, out=out)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A whole tensor.

    Attributes:
        name: in its layout.
        shape: [N, K], or [N].
        axis: that the parts lie along, one after the other; None if each is the whole.
        parts: those of the ranks in order, or only one.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None
    parts: tuple[Part, ...]

    @property
    def files(self) -> set[str]:
        """Names of the files it is read from."""
        return {file for part in self.parts for file in part.files}

    def read(self, reader: RowReader, first: int, out: NDArray[np.float32]) -> None:
        """Write rows from number `first` on to `out`, as many as it has.

        Raises:
            CheckpointError: a file cannot be read, or ranks that should have the same do not.
        """
        if self.axis is None:
            self._read_whole(reader, first, out)
            return
        begin = 0
        for part in self.parts:
            length = part.tensor.shape[self.axis]
            if self.axis == 1:
                part.read(reader, first, out[:, begin : begin + length])
            else:
                low, high = max(first, begin), min(first + len(out), begin + length)
                if low < high:
                    part.read(reader, low - begin, out[low - first : high - first])
            begin += length

    def _read_whole(self, reader: RowReader, first: int, out: NDArray[np.float32]) -> None:
        one, *others = self.parts
        one.read(reader, first, out)
        for other in others:
            copy = np.empty_like(out)
            other.read(reader, first, copy)
            names = [f"{self.name} in {part.tensor.weight.file}" for part in (one, other)]
            check_equal(out, copy, first, (names[0], names[1]), "get the files again")


def check_equal(
    values: NDArray[np.float32],
    others: NDArray[np.float32],
    first: int,
    names: tuple[str, str],
    advice: str,
) -> None:
    """Check that rows from number `first` on are the same in two tensors.

    Raises:
        CheckpointError: they are not; the first difference is told.
    """
    if np.array_equal(values, others):
        return
    row, *rest = place = tuple(int(i) for i in np.argwhere(values != others)[0])
    raise CheckpointError(
        f"{names[0]} and {names[1]} must be the same, but at {[first + row, *rest]} they are "
        f"{values[place]} and {others[place]}: {advice}"
    )
