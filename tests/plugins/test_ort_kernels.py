"""What the native kernels compute in ONNX Runtime, by each instruction set."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.calls import (
    ATTENTION,
    CALLS,
    FEW,
    LINEAR,
    SCALES,
    attention_call,
    experts_call,
    linear_call,
)
from tests.plugins.formulas import Call, assert_right, assert_same_bits
from tests.plugins.ort_calls import run, run_from_file

each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
few = settings(deadline=None, max_examples=40)


@each_call
def test_results_are_as_near_the_formula_as_float32_sums_are(call: Call, isa: str) -> None:
    assert_right(call, run(call), isa)


@few
@given(data=st.data())
def test_a_matrix_may_have_any_shape(data: st.DataObject, isa: str) -> None:
    sizes = st.integers(1, 40) | st.integers(1, 300)
    groups = data.draw(st.sampled_from([1, 2, 8]))
    call = linear_call(
        data.draw(st.integers(1, 40)),
        groups * data.draw(sizes),
        data.draw(sizes),
        groups,
        data.draw(st.sampled_from([*SCALES])),
        seed=data.draw(st.integers(0, 99)),
    )
    assert_right(call, run(call), isa)


def test_a_scale_times_1000_changes_its_own_column_alone(isa: str) -> None:
    call = linear_call(9, 104, 51, 8, "bfloat16")
    scales = call.inputs["scales"].copy()
    scales[:, 7] *= 1000
    larger = call.but(scales=scales)
    others = np.arange(51) != 7
    (before,), (after,) = run(call), run(larger)
    np.testing.assert_array_equal(after[..., others], before[..., others])
    assert_right(larger, [after], isa)


@few
@given(data=st.data())
def test_experts_may_have_any_shape(data: st.DataObject, isa: str) -> None:
    sizes, groups = st.integers(1, 40), st.sampled_from([1, 2, 8])
    parts = (data.draw(groups), data.draw(groups), data.draw(groups))
    call = experts_call(
        data.draw(st.integers(1, 60)),
        max(parts[:2]) * data.draw(sizes),
        parts[2] * data.draw(sizes),
        groups=parts,
        scales=data.draw(st.sampled_from([*SCALES])),
        experts=data.draw(st.integers(2, 9)),
        seed=data.draw(st.integers(0, 99)),
    )
    assert_right(call, run(call), isa)


@few
@given(data=st.data())
def test_attention_may_have_any_shape(data: st.DataObject, isa: str) -> None:
    tokens = data.draw(st.sampled_from([1, 1]) | st.integers(1, 20))
    start = data.draw(st.lists(st.integers(0, 70) | st.integers(0, 1100), min_size=1, max_size=3))
    call = attention_call(
        start,
        tokens,
        max(start) + tokens + data.draw(st.integers(0, 9)),
        group=data.draw(st.integers(1, 6)),
        kv_heads=data.draw(st.integers(1, 2)),
        size=data.draw(st.sampled_from([1, 4, 24, 31, 80])),
        seed=data.draw(st.integers(0, 99)),
    )
    assert_right(call, run(call), isa)


@pytest.mark.parametrize("case", FEW)
def test_any_number_of_threads_gives_the_same_bits(case: str, isa: str) -> None:
    for threads in (2, 7):
        assert_same_bits(run(CALLS[case], threads=threads), run(CALLS[case]))


@pytest.mark.parametrize(
    "call",
    [
        linear_call(5, 31, 65, scales="bfloat16"),
        linear_call(17, 40, 65, 8, scales="float16"),
        linear_call(2, 1601, 1031),
        experts_call(20, 31, 65, scales="bfloat16"),
        experts_call(3, 24, 1031, groups=(1, 1, 1031), scales="float16"),
    ],
    ids=["linear", "linear-in-blocks", "linear-in-parts", "experts-in-blocks", "experts"],
)
def test_weights_may_lie_anywhere(call: Call, isa: str, tmp_path: Path) -> None:
    """In memory at even and at odd addresses, and in a file at odd offsets."""
    outputs = run(call, place=lambda _name, array: array.copy())
    assert_right(call, outputs, isa)
    assert_same_bits(run(call), outputs)
    assert_same_bits(run_from_file(call, tmp_path), outputs)


@pytest.mark.parametrize("call", ATTENTION.values(), ids=ATTENTION)
def test_a_cache_may_be_another_memory_afterwards(call: Call, isa: str) -> None:
    before = {name: array.tobytes() for name, array in call.inputs.items()}
    assert_same_bits(run(call, place=lambda _name, array: array, in_place=False), run(call))
    assert {name: array.tobytes() for name, array in call.inputs.items()} == before


@pytest.mark.parametrize("call", [ATTENTION["ragged-chunk"], ATTENTION["splits"]])
def test_what_lies_beyond_the_live_part_of_a_cache_does_not_matter(call: Call, isa: str) -> None:
    filled = {name: np.nan_to_num(call.inputs[name], nan=1e30) for name in ("k_cache", "v_cache")}
    assert_same_bits(run(call.but(**filled))[:1], run(call)[:1])


def test_a_row_of_zeros_gives_zeros(isa: str) -> None:
    for name in ("zeros", "zeros-in-blocks"):
        call = LINEAR[name]
        (y,) = run(call)
        assert not y[::3].any()
        assert y[1::3].all()


def test_rows_do_not_meet(isa: str) -> None:
    """A row's result is the same beside other rows, if those are as many."""
    for tokens in (7, 29):
        call = linear_call(tokens, 300, 65, 4, "bfloat16")
        x = call.inputs["x"].copy()
        x[:-1] = 1e9
        (y,), (other,) = run(call), run(call.but(x=x))
        np.testing.assert_array_equal(y[-1], other[-1])


def with_nan(name: str, call: Call, *place: int) -> Call:
    array = call.inputs[name].copy()
    array[place] = np.nan
    return call.but(**{name: array})


@pytest.mark.parametrize("case", ["three-tokens", "tile-and-one"])
@pytest.mark.usefixtures("isa")
def test_what_is_no_number_makes_none_of_its_row_alone(case: str) -> None:
    call = LINEAR[case]
    (before,), (after,) = run(call), run(with_nan("x", call, 1, 7))
    others = np.arange(len(before)) != 1
    assert np.isnan(after[1]).all()
    np.testing.assert_array_equal(after[others], before[others])


@pytest.mark.parametrize("name", ["query", "key"])
def test_attention_to_what_is_no_number_is_none(name: str, isa: str) -> None:
    y = run(with_nan(name, ATTENTION["first-token"], 0, 0, 5))[0]
    assert np.isnan(y[..., :24]).all()
