"""Tensors of a checkpoint as others store them, some rows at a time.

A matrix is [out, in] there, and sums run along its last axis: it is the transpose of ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.config import Dtype, GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.weights_to.options import WeightDtype
from export_grok.regular_file import open_regular
from export_grok.weights import NUMPY_DTYPES, Weight, WeightIndex

__all__ = [
    "Rows",
    "check_scales",
    "memory_needed",
    "rounded",
    "rows_of_floats",
    "rows_of_matrix",
]

# So many columns of ours are turned at once: what is read and written then fits into a core's
# cache, which makes it ten times as fast as turning the whole.
ROWS = 128
# Floats that are in memory at once.
BLOCK_ITEMS = 1 << 22

FLOAT16_MAX = float(np.finfo(np.float16).max)
LARGEST_CODE = 128


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of an int8 matrix.

    Attributes:
        codes: int8 [n, K].
        scales: float32 [n, R]; those of column k are at k // (K / R).
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]

    def values(self) -> NDArray[np.float32]:
        """Return what they stand for, [n, K]: a code times a bfloat16 is exact in float32."""
        rows, groups = self.scales.shape
        values = self.codes.reshape(rows, groups, -1) * self.scales[..., None]
        return values.reshape(self.codes.shape)

    def scales_of_blocks(self, size: int) -> NDArray[np.float32]:
        """Return the scale of every block of `size` columns, [n, K / size]; R divides K / size."""
        blocks = self.codes.shape[1] // size
        return np.repeat(self.scales, blocks // self.scales.shape[1], axis=1)


def rows_of_matrix(index: WeightIndex, name: str, *expert: int) -> Iterator[Rows]:
    """Yield an int8 matrix of ours, e.g. `layers.0.experts.up` of an expert, turned.

    Raises:
        CheckpointError: a file cannot be read to the end of the matrix.
    """
    matrix = _read(index, index[f"{name}.weight"].block(*expert))
    scales = _read(index, index[f"{name}.scales"].block(*expert)).astype(np.float32).T
    for first in range(0, matrix.shape[1], ROWS):
        part = slice(first, first + ROWS)
        yield Rows(
            codes=np.ascontiguousarray(np.ascontiguousarray(matrix[:, part]).T),
            scales=np.ascontiguousarray(scales[part]),
        )


def rows_of_floats(index: WeightIndex, name: str) -> Iterator[NDArray[np.float32]]:
    """Yield a float tensor: a vector, the embedding by rows, or the router turned, [E, M].

    Raises:
        CheckpointError: a file cannot be read to the end of the tensor.
    """
    weight = index[name]
    if name.endswith("router.weight"):
        yield np.ascontiguousarray(_read(index, weight).T)
    elif len(weight.shape) == 1:
        yield _read(index, weight)
    else:
        height, width = weight.shape
        step = max(1, BLOCK_ITEMS // width)
        for first in range(0, height, step):
            yield _read(index, weight, first, min(step, height - first))


def rounded(values: NDArray[np.float32], dtype: Dtype, name: str) -> NDArray[np.uint8]:
    """Return the bytes of values in a dtype, each rounded to the nearest.

    Raises:
        CheckpointError: a value is beyond float16.
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(NUMPY_DTYPES[dtype], copy=False)
    if dtype == "float16" and not np.isfinite(narrow).all():
        raise CheckpointError(
            f"{name} has values or scales beyond {FLOAT16_MAX:.0f}, the largest of float16: "
            "take a wider dtype"
        )
    return narrow.view(np.uint8)


def check_scales(index: WeightIndex, dtype: WeightDtype) -> float:
    """Refuse scales that cannot be kept, before anything is written.

    Args:
        index: of the model.
        dtype: the matrices are to have. As int8 their scales become float16.

    Returns:
        The largest share of a scale that is lost; 0 if all are kept as they are.

    Raises:
        CheckpointError: scales are no numbers, or too large for the dtype. All such matrices are
            found before it is raised.
    """
    faults, lost = [], 0.0
    # Q8_0 keeps the scales in float16; written as float16 are the products with a code.
    top = {"int8": FLOAT16_MAX, "float16": FLOAT16_MAX / LARGEST_CODE}.get(dtype, np.inf)
    for weight in index:
        if weight.dtype != "bfloat16":
            continue
        scales = np.abs(_read(index, weight).astype(np.float32))
        largest = float(scales.max())
        if not np.isfinite(largest):
            faults.append(f"{weight.name} has values that are nan or inf: get the file again")
        elif largest > top:
            faults.append(
                f"{weight.name} goes up to {largest:.4g}, and may to {top:.4g} as {dtype}: take "
                "--dtype bfloat16"
            )
        elif dtype == "int8":
            some = scales[scales > 0]
            errors = np.abs(some.astype(np.float16).astype(np.float32) / some - 1)
            lost = max(lost, float(errors.max(initial=0.0)))
    if faults:
        raise CheckpointError(f"{index.root} cannot be written as {dtype}:", faults)
    return lost


def memory_needed(config: GrokConfig) -> int:
    """Return how many bytes are in memory at once: one matrix, and its rows in some dtypes."""
    inner = max(config.emb_size, config.ffn_size, config.q_size)
    largest = config.emb_size * max(config.ffn_size, config.q_size)
    return largest + 16 * (ROWS * inner + BLOCK_ITEMS)


def _read(
    index: WeightIndex, weight: Weight, first: int = 0, rows: int | None = None
) -> NDArray[Any]:
    """Return a tensor, or some of its rows, in memory of its own."""
    dtype = NUMPY_DTYPES[weight.dtype]
    shape = weight.shape if rows is None else (rows, *weight.shape[1:])
    count = int(np.prod(shape))
    start = weight.offset + first * (weight.nbytes // weight.shape[0])
    path = index.root / weight.file
    try:
        with open_regular(path) as file:
            found = np.fromfile(file, dtype, count, offset=start)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(found) != count:
        raise CheckpointError(f"{path} ends within {weight.name}; get it again")
    return found.reshape(shape)
