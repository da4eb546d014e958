"""A tensor in a file of another layout: rows of it, read where they lie, as float32."""

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from export_grok.errors import CheckpointError
from export_grok.regular_file import open_regular
from export_grok.weights import NUMPY_DTYPES, StoredDtype, Weight

__all__ = ["FLOATS", "RowReader", "SourceTensor", "widen"]

# How many times the room of its elements a view may take to be read with what lies between.
MOST_APART = 4

_FP8: dict[StoredDtype, NDArray[np.float32]] = {
    "float8_e4m3fn": np.arange(256, dtype=np.uint8)
    .view(ml_dtypes.float8_e4m3fn)
    .astype(np.float32),
    "float8_e5m2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32),
}
FLOATS: tuple[StoredDtype, ...] = ("float32", "float16", "bfloat16", *_FP8)


@dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor as it lies in its file.

    Attributes:
        weight: its file, the place of its first element, its dtype and shape.
        strides: how many elements lie from one to the next, on each axis; None in C order.
    """

    weight: Weight
    strides: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self.weight.shape

    @property
    def dtype(self) -> StoredDtype:
        """Of the stored bytes."""
        return self.weight.dtype


class RowReader:
    """Reads rows of tensors below a folder; each thread needs one of its own."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._scratch = memoryview(b"")

    def rows(self, tensor: SourceTensor, first: int, count: int) -> NDArray[Any]:
        """Return rows of the stored dtype, [count] and the other axes; good until the next call.

        Args:
            tensor: of one or two axes.
            first: number of the first row.
            count: how many.

        Raises:
            CheckpointError: the file is missing or too short.
        """
        weight, dtype = tensor.weight, NUMPY_DTYPES[tensor.dtype]
        shape = (count, *tensor.shape[1:])
        strides = tensor.strides or (*tensor.shape[1:], 1)
        # Elements from the first of these rows to their last.
        reach = 1 + sum(
            (length - 1) * stride for length, stride in zip(shape, strides, strict=True)
        )
        begin = weight.offset + first * strides[0] * dtype.itemsize
        path = self._root / weight.file
        try:
            # The rows of a transposed view lie all over the tensor: only what is touched is read.
            take = self._read if reach <= MOST_APART * math.prod(shape) else _mapped
            data = take(path, begin, reach * dtype.itemsize)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read at {weight.name}: {error}; get the file again"
            ) from error
        return np.ndarray(shape, dtype, data, strides=[n * dtype.itemsize for n in strides])

    def _read(self, path: Path, begin: int, nbytes: int) -> memoryview:
        if len(self._scratch) < nbytes:
            self._scratch = memoryview(bytearray(nbytes))
        with open_regular(path) as file:
            file.seek(begin)
            done = 0
            while done < nbytes:
                count = file.readinto(self._scratch[done:nbytes])
                if not count:
                    raise ValueError(f"it ends {nbytes - done} bytes too early")
                done += count
        return self._scratch[:nbytes]


def _mapped(path: Path, begin: int, nbytes: int) -> memoryview:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size < begin + nbytes:
            raise ValueError("it ends too early")
        page = begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            file.fileno(), page + nbytes, access=mmap.ACCESS_READ, offset=begin - page
        )
    return memoryview(mapped)[page:]


def widen(values: NDArray[Any], out: NDArray[np.float32]) -> None:
    """Write values of a float dtype to `out`, which holds all of them exactly."""
    if values.dtype == ml_dtypes.bfloat16:
        # A bfloat16 is the upper half of a float32.
        bits = out.view(np.uint32)
        np.copyto(bits, values.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
        return
    for name, table in _FP8.items():
        if values.dtype == NUMPY_DTYPES[name]:
            np.take(table, values.view(np.uint8), out=out, mode="clip")
            return
    np.copyto(out, values)
