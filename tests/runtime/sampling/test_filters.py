"""Laws of the filters; temperature and nucleus against results of the original program."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.runtime.sampling.filters import (
    filtered,
    min_p_mask,
    nucleus_mask,
    scaled,
    top_k_mask,
)
from tests.runtime.sampling.logits import INF, Float32, random_logits, rows


def nucleus_by_sorting(row: Float32, top_p: float) -> NDArray[np.bool_]:
    """Return the nucleus as the original's formula says it, every value sorted and summed."""
    ascending = np.sort(row)
    weights = np.exp(ascending.astype(np.float64) - ascending[-1])
    start = np.float32(1) - np.float32(top_p)
    sums = np.cumsum(weights / weights.sum())
    first = min(int(np.count_nonzero(sums < start)), row.size - 1)
    keep: NDArray[np.bool_] = row >= ascending[first]
    return keep


def test_temperature_divides_as_in_the_original(goldens: dict[str, NDArray[Any]]) -> None:
    x = scaled(goldens["logits"], goldens["temperature"])
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, goldens["f32/scaled"])
    again = scaled(goldens["logits"], goldens["temperature"].tolist())
    assert again.dtype == np.float32
    np.testing.assert_array_equal(again, x)


def test_nucleus_keeps_what_the_original_keeps(goldens: dict[str, NDArray[Any]]) -> None:
    allowed = goldens["mask"] != 0
    x = filtered(scaled(goldens["logits"], goldens["temperature"]), allowed)
    keep = nucleus_mask(x, goldens["nucleus_p"])
    x = filtered(x, keep)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, goldens["f32/filtered"])
    np.testing.assert_array_equal(keep & allowed, goldens["f32/kept"])


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-46, 1e-40, 1e-37, 1e-20])
def test_a_quotient_beyond_float32_is_its_limit(temperature: float) -> None:
    logits = rows([1e-30, -1e20, 3, 3, -INF], [0, 0, 0, -1, -INF])
    x = scaled(logits, [temperature, temperature])
    assert not np.isnan(x).any()
    if temperature < 1e-38:
        assert x[0].tolist() == [-INF, -INF, 0, 0, -INF]


def test_nucleus_of_nothing_keeps_the_largest_and_its_equals() -> None:
    logits = random_logits(20, 500)
    logits[0, [3, 400]] = 50
    keep = nucleus_mask(logits, [0.0] * 20)
    np.testing.assert_array_equal(keep, logits == logits.max(axis=-1, keepdims=True))


def test_nucleus_of_everything_keeps_everything() -> None:
    logits = rows([0, -1e10, -100, -INF])
    assert nucleus_mask(logits, [1.0]).all()


def test_each_row_has_its_own_nucleus() -> None:
    logits = random_logits(3, 50)
    together = nucleus_mask(logits, [0.5, 1.0, 0.9])
    for row, top_p in enumerate([0.5, 1.0, 0.9]):
        alone = nucleus_mask(logits[row : row + 1], [top_p])
        np.testing.assert_array_equal(together[row], alone[0])


@settings(deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    top_p=st.floats(0, 1, width=32),
)
def test_nucleus_is_the_smallest_set_of_enough_mass(values: list[int], top_p: float) -> None:
    logits = rows([float(value) for value in values])
    keep = nucleus_mask(logits, [top_p])[0]
    assert keep.any()
    mass = np.exp(logits[0].astype(np.float64))
    mass /= mass.sum()
    lowest = logits[0][keep].min()
    assert (keep == (logits[0] >= lowest)).all()
    assert mass[keep].sum() >= top_p - 1e-6
    # Without all the equals at the threshold it would fall short.
    assert mass[logits[0] > lowest].sum() <= top_p + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 63, 64, 65, 1000, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0]),
    top_p=st.sampled_from([0.0, 1e-6, 0.3, 0.5, 0.9, 0.99, 0.9999, 1.0]),
    forbidden=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 1000),
)
def test_nucleus_without_sorting_all_is_that_of_sorting_all(
    vocabulary: int, spread: float, top_p: float, forbidden: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    row = (generator.standard_normal(vocabulary) * spread).astype(np.float32)
    row[1:][generator.random(vocabulary - 1) < forbidden] = -np.inf
    keep = nucleus_mask(row[None], [top_p])[0]
    if top_p == 1:
        assert keep.all()
    else:
        np.testing.assert_array_equal(keep, nucleus_by_sorting(row, top_p))


@settings(deadline=None)
@given(values=st.lists(st.integers(-2, 2), min_size=1, max_size=20), k=st.integers(0, 25))
def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids(values: list[int], k: int) -> None:
    keep = top_k_mask(rows([float(value) for value in values]), [k])[0]
    best = sorted(range(len(values)), key=lambda token: (-values[token], token))
    expected = best[:k] if k else best
    assert np.flatnonzero(keep).tolist() == sorted(expected)


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(64, 700),
    k=st.integers(1, 700),
    values=st.sampled_from([2, 5, 10**6]),
    ascending=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_top_k_of_many_tokens_is_that_of_sorting(
    vocabulary: int, k: int, values: int, ascending: bool, seed: int
) -> None:
    row = np.random.default_rng(seed).integers(0, values, vocabulary).astype(np.float32)
    row[vocabulary // 2] = -np.inf
    if ascending:
        row.sort()  # the largest are all in one place
    best = np.argsort(-row, kind="stable")[:k]
    assert np.flatnonzero(top_k_mask(row[None], [k])[0]).tolist() == sorted(best.tolist())


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30),
    min_p=st.floats(0, 1),
)
def test_min_p_keeps_what_has_that_part_of_the_largest_probability(
    values: list[float], min_p: float
) -> None:
    logits = rows(values)
    keep = min_p_mask(logits, [min_p])[0]
    mass = np.exp(logits[0].astype(np.float64))
    mass /= mass.sum()
    # At the border itself rounding decides.
    assert keep[mass > min_p * mass.max() * (1 + 1e-9)].all()
    assert not keep[mass < min_p * mass.max() * (1 - 1e-9)].any()
    assert keep[logits[0].argmax()]


def test_min_p_of_nothing_keeps_everything_and_of_one_the_largest_and_its_equals() -> None:
    logits = rows([0, 7, -INF, 7, np.nextafter(np.float32(7), np.float32(0))])
    assert min_p_mask(logits, [0.0]).all()
    assert min_p_mask(logits, [1.0])[0].tolist() == [False, True, False, True, False]
    assert not min_p_mask(logits, [5e-324])[0, 2]


def test_each_row_has_its_own_min_p() -> None:
    logits = random_logits(3, 50)
    together = min_p_mask(logits, [0.5, 0.0, 0.01])
    for row, min_p in enumerate([0.5, 0.0, 0.01]):
        alone = min_p_mask(logits[row : row + 1], [min_p])
        np.testing.assert_array_equal(together[row], alone[0])
