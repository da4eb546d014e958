"""Rows of a matrix are those of the whole, whatever its parts, strides and dtypes."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.export.layouts.matrix import BLOCK, Matrix, Part
from export_grok.export.layouts.source_tensor import FLOATS, RowReader, SourceTensor
from export_grok.weights import NUMPY_DTYPES, StoredDtype, Weight

many = settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Files:
    """Writes arrays to one file, at odd offsets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "weights").write_bytes(b"")

    def tensor(
        self, array: NDArray[Any], dtype: StoredDtype = "float32", *, transposed: bool = False
    ) -> SourceTensor:
        """Return where `array` lies; `transposed` has its columns one after the other."""
        with (self.folder / "weights").open("ab") as file:
            file.write(b"?")
            offset = file.tell()
            file.write((array.T if transposed else array).tobytes())
        weight = Weight(name="w", file="weights", offset=offset, dtype=dtype, shape=array.shape)
        return SourceTensor(weight=weight, strides=(1, len(array)) if transposed else None)

    def read(self, matrix: Matrix, first: int, count: int) -> NDArray[np.float32]:
        out = np.full((count, *matrix.shape[1:]), np.nan, np.float32)
        matrix.read(RowReader(self.folder), first, out)
        return out


def values(shape: tuple[int, ...], dtype: StoredDtype, seed: int = 0) -> NDArray[Any]:
    random = np.random.default_rng(seed)
    return random.uniform(-2, 2, shape).astype(np.float32).astype(NUMPY_DTYPES[dtype])


@many
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    dtype=st.sampled_from(FLOATS),
    transposed=st.booleans(),
    data=st.data(),
)
def test_rows_are_those_that_were_written(
    shape: tuple[int, int],
    dtype: StoredDtype,
    transposed: bool,
    data: st.DataObject,
    tmp_path: Path,
) -> None:
    array = values(shape, dtype)
    files = Files(tmp_path)
    tensor = files.tensor(array, dtype, transposed=transposed)
    matrix = Matrix(name="w", shape=shape, axis=None, parts=(Part(tensor=tensor),))
    first = data.draw(st.integers(0, shape[0] - 1))
    count = data.draw(st.integers(1, shape[0] - first))
    found = files.read(matrix, first, count)
    assert np.array_equal(found, array.astype(np.float32)[first : first + count])


@many
@given(
    ranks=st.sampled_from([1, 2, 4, 8]),
    part=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    axis=st.integers(0, 1),
    dtypes=st.lists(st.sampled_from(["float32", "float16", "bfloat16"]), min_size=8, max_size=8),
    data=st.data(),
)
def test_parts_of_ranks_lie_one_after_the_other(
    ranks: int,
    part: tuple[int, int],
    axis: int,
    dtypes: list[StoredDtype],
    data: st.DataObject,
    tmp_path: Path,
) -> None:
    arrays = [values(part, dtypes[rank], seed=rank) for rank in range(ranks)]
    whole = np.concatenate([array.astype(np.float32) for array in arrays], axis)
    files = Files(tmp_path)
    parts = tuple(
        Part(tensor=files.tensor(array, dtypes[rank], transposed=rank % 2 == 1))
        for rank, array in enumerate(arrays)
    )
    matrix = Matrix(name="w", shape=whole.shape, axis=axis, parts=parts)
    first = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(1, len(whole) - first))
    assert np.array_equal(files.read(matrix, first, count), whole[first : first + count])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8_is_widened_exactly(dtype: StoredDtype, tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).view(NUMPY_DTYPES[dtype]).reshape(16, 16)
    files = Files(tmp_path)
    parts = (Part(tensor=files.tensor(codes, dtype)),)
    found = files.read(Matrix(name="w", shape=(16, 16), axis=None, parts=parts), 0, 16)
    assert np.array_equal(found, codes.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("shape", [(5, 7), (BLOCK, BLOCK), (2 * BLOCK + 3, BLOCK + 9)])
@pytest.mark.parametrize("kind", ["one", "row", "column", "block"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values_are_multiplied_by_the_scales_that_are_theirs(
    shape: tuple[int, int], kind: str, dtype: Any, tmp_path: Path
) -> None:
    rows, columns = shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    of = {"one": (), "row": (rows,), "column": (rows, 1), "block": blocks}[kind]
    scales = np.asarray(np.random.default_rng(1).uniform(0.1, 3, of), np.float32).astype(dtype)
    codes = values(shape, "float8_e4m3fn")
    files = Files(tmp_path)
    part = Part(
        tensor=files.tensor(codes, "float8_e4m3fn"),
        scales=files.tensor(scales, "float32" if dtype is np.float32 else "bfloat16"),
        blocks=kind == "block",
    )
    matrix = Matrix(name="w", shape=shape, axis=None, parts=(part,))
    factors = scales.astype(np.float32)
    if kind == "block":
        factors = np.kron(factors, np.ones((BLOCK, BLOCK), np.float32))[:rows, :columns]
    elif kind == "row":
        factors = factors[:, None]
    expected = codes.astype(np.float32) * factors
    for first, count in ((0, rows), (rows // 2, rows - rows // 2), (rows - 1, 1)):
        found = files.read(matrix, first, count)
        assert np.array_equal(found, expected[first : first + count])
