"""What kernels are checked with: fresh numbers everywhere, and NaN where nothing may be read."""

import numpy as np
import pytest

from scripts.gpu import inputs
from scripts.gpu.cases import Matrix, combine, gate_up, product, split
from scripts.gpu.inputs import random_codes, random_inputs


def random() -> np.random.Generator:
    return np.random.default_rng(3)


def test_codes_are_all_of_int8() -> None:
    assert len(np.unique(random_codes(random(), (100, 100)))) == 256
    assert random_codes(random(), (3, 5)).shape == (3, 5)


def test_many_codes_repeat_a_piece_that_fits_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PIECE", 997)
    codes = random_codes(random(), (50, 128))
    flat = codes.reshape(-1)
    assert (flat[:-997] == flat[997:]).all()
    assert len(np.unique(codes, axis=0)) == 50
    assert len({column.tobytes() for column in codes.T}) == 128


def test_products_are_about_1_whatever_the_size() -> None:
    for rows in (16, 1600):
        case = product("", "float32", 4, Matrix(rows=rows, columns=50, groups=2), 1)
        found = random_inputs(case, random())
        scales = np.repeat(found["scales"].astype(np.float64), rows // 2, 0)
        y = found["x"].astype(np.float64) @ (found["weight"] * scales)
        assert 0.3 < y.std() < 3


def test_scales_of_groups_and_columns_differ() -> None:
    case = product("", "float32", 1, Matrix(rows=8, columns=50, groups=4, scales="float32"), 1)
    scales = random_inputs(case, random())["scales"]
    assert len(np.unique(scales)) == scales.size
    assert (scales < 0).any()
    assert (scales > 0).any()


def test_behind_a_row_s_tokens_there_is_no_number() -> None:
    found = random_inputs(split("", "bfloat16", (6, 2, 30, 16), 2, 2, 0.3), random())
    assert found["start"].max() == 29, "one row fills the cache"
    for name in ("k_cache", "v_cache"):
        for cache, start in zip(found[name].astype(np.float32), found["start"], strict=True):
            assert np.isfinite(cache[:, : start + 1]).all()
            assert np.isnan(cache[:, start + 1 :]).all()


def test_some_parts_have_nothing_and_the_first_always_something() -> None:
    found = random_inputs(combine("", "float32", (4, 3, 8, 2, 16)), random())
    dead = np.isneginf(found["stats"][..., 0])
    assert dead.any()
    assert not dead[:, :, 0].any()
    assert not found["sums"][dead].any()
    assert not found["stats"][dead][:, 1].any()


def test_experts_are_any_and_the_same_twice_too() -> None:
    matrix = Matrix(rows=4, columns=4, experts=8)
    chosen = random_inputs(gate_up("", "float32", (64, 2), matrix), random())["experts"]
    assert set(np.unique(chosen)) == set(range(8))
    assert (chosen[:, 0] == chosen[:, 1]).any()
