"""Quantising to int8 keeps every value within half a step, and brings back what was int8."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from export_grok.errors import CheckpointError
from export_grok.export.quantise import LARGEST, Quantiser

Float = NDArray[np.float32]
many = settings(deadline=None, max_examples=150)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Float, int]:
    """Return a matrix [N, K], outputs first, of values of very different size, and groups."""
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    shape = (draw(st.integers(1, 24)), groups * draw(st.integers(1, 9)))
    values = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False) | st.sampled_from(
        [0.0, -0.0]
    )
    return draw(arrays.arrays(np.float32, shape, elements=values)), groups


def quantised(
    matrix: Float, groups: int, *, block: int | None = None, restore: bool = False
) -> Quantiser:
    """Quantise a matrix [N, K], in blocks of columns."""
    columns, rows = matrix.shape
    quantiser = Quantiser(rows, columns, groups, restore=restore)
    for first in range(0, columns, block or columns):
        quantiser.add(first, matrix[first : first + (block or columns)].copy())
    return quantiser


def spread(quantiser: Quantiser) -> Float:
    """Return the scale of each code [K, N]."""
    rows = quantiser.codes.shape[0] // quantiser.scales.shape[0]
    return np.repeat(quantiser.scales.astype(np.float32), rows, axis=0)


def from_int8(codes: NDArray[np.int8], scales: NDArray[Any], dtype: Any = np.float32) -> Float:
    """Return what codes [K, N] with scales [R, N] stand for, [N, K], rounded to a dtype."""
    factors = np.repeat(scales.astype(np.float32), len(codes) // len(scales), axis=0)
    product: Float = (codes * factors).astype(dtype).astype(np.float32)
    return product.T


@many
@given(case=matrices(), restore=st.booleans())
def test_every_value_is_within_half_a_step(case: tuple[Float, int], restore: bool) -> None:
    matrix, groups = case
    made = quantised(matrix, groups, restore=restore)
    step = spread(made).astype(np.float64)
    error = np.abs(matrix.T.astype(np.float64) - made.codes * step)
    assert (error <= step * 0.5000001 + 1e-44).all()


@many
@given(case=matrices())
def test_the_scale_is_the_smallest_bfloat16_with_which_nothing_is_cut_off(
    case: tuple[Float, int],
) -> None:
    matrix, groups = case
    made = quantised(matrix, groups)
    largest = np.abs(matrix.reshape(len(matrix), groups, -1)).max(-1).T / np.float32(LARGEST)
    smaller = (made.scales.view(np.uint16) - (made.scales != 0)).astype(np.uint16)
    assert (made.scales.astype(np.float32) >= largest).all()
    assert ((smaller.view(made.scales.dtype) < largest) | (made.scales == 0)).all()
    assert not np.signbit(made.scales.astype(np.float32)).any()
    assert np.abs(made.codes.astype(int)).max() <= LARGEST


def test_halves_are_rounded_to_even() -> None:
    row = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32)
    assert quantised(row, 1).codes.T.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def test_a_column_of_zeros_has_scale_zero() -> None:
    made = quantised(np.zeros((3, 16), np.float32), 2, restore=True)
    assert not made.codes.any()
    assert not made.scales.view(np.uint16).any()
    assert made.error("x").relative_error == 0


@many
@given(
    case=matrices(),
    block=st.sampled_from([1, 3, 8, 16]),
    restore=st.booleans(),
)
def test_blocks_of_columns_change_nothing(
    case: tuple[Float, int], block: int, restore: bool
) -> None:
    matrix, groups = case
    whole = quantised(matrix, groups, restore=restore)
    made = quantised(matrix, groups, block=block, restore=restore)
    assert np.array_equal(made.codes, whole.codes)
    assert made.scales.tobytes() == whole.scales.tobytes()
    expected, found = whole.error("x"), made.error("x")
    assert found.relative_error == pytest.approx(expected.relative_error, rel=1e-5, abs=1e-9)
    assert found.saturated == expected.saturated


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("largest", [126, 127, -128])
@pytest.mark.parametrize("groups", [1, 8])
def test_what_was_int8_comes_back(dtype: Any, largest: int, groups: int) -> None:
    random = np.random.default_rng(groups)
    codes = random.integers(-126, 127, (64 * groups, 96)).astype(np.int8)
    codes.reshape(groups, -1, 96)[:, 5] = largest
    scales = random.uniform(1e-4, 9e-4, (groups, 96)).astype(ml_dtypes.bfloat16)
    made = quantised(from_int8(codes, scales, dtype), groups, restore=True)
    assert np.array_equal(made.codes, codes)
    assert made.scales.tobytes() == scales.tobytes()


def test_without_restoring_half_of_what_was_rounded_to_bfloat16_would_be_lost() -> None:
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, (256, 64)).astype(np.int8)
    codes[0] = 127
    scales = random.uniform(1e-4, 9e-4, (1, 64)).astype(ml_dtypes.bfloat16)
    matrix = from_int8(codes, scales, ml_dtypes.bfloat16)
    assert 0.2 < (quantised(matrix, 1).scales != scales).mean() < 0.8
    assert (quantised(matrix, 1, restore=True).scales == scales).all()


def test_a_largest_value_of_127_comes_back_from_float32_by_the_plain_rule_too() -> None:
    random = np.random.default_rng(1)
    codes = random.integers(-127, 128, (128, 64)).astype(np.int8)
    codes[7] = -127
    scales = random.uniform(1e-4, 9e-4, (1, 64)).astype(ml_dtypes.bfloat16)
    made = quantised(from_int8(codes, scales), 1)
    assert np.array_equal(made.codes, codes)
    assert made.error("x").relative_error == 0


def test_what_was_never_int8_is_quantised_by_the_plain_rule() -> None:
    matrix = np.random.default_rng(2).standard_normal((64, 512)).astype(np.float32)
    plain, restored = quantised(matrix, 2), quantised(matrix, 2, restore=True)
    assert np.array_equal(plain.codes, restored.codes)
    assert np.array_equal(plain.scales, restored.scales)


def test_the_error_is_that_of_all_matrices() -> None:
    matrices = np.random.default_rng(3).standard_normal((3, 32, 48)).astype(np.float32)
    quantiser = Quantiser(48, 32, 4)
    square = difference = largest = saturated = 0.0
    for matrix in matrices:
        quantiser.add(0, matrix.copy())
        error = matrix.T - quantiser.codes * spread(quantiser)
        square += float(np.square(matrix.astype(np.float64)).sum())
        difference += float(np.square(error.astype(np.float64)).sum())
        largest = max(largest, float(np.abs(error).max()))
        saturated += int((np.abs(quantiser.codes) == LARGEST).sum())
    found = quantiser.error("layers.0.experts.up")
    assert found.name == "layers.0.experts.up"
    assert found.values == matrices.size
    assert found.relative_error == pytest.approx((difference / square) ** 0.5, rel=1e-4)
    assert found.max_error == pytest.approx(largest, rel=1e-3)
    assert found.saturated == saturated / matrices.size
    assert 0 < found.scale_min < found.scale_max < 0.1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_named_with_its_place(value: float) -> None:
    matrix = np.ones((4, 8), np.float32)
    matrix[2, 5] = value
    with pytest.raises(CheckpointError, match=rf"holds {value} at \[12, 5\]; weights are finite"):
        Quantiser(8, 16, 2).add(10, matrix)
