"""What a comparison sees: all that counts, nothing that does not, at the place where it is."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.runtime.verify.comparison import Findings, compared
from export_grok.runtime.verify.deviation import token_errors
from export_grok.runtime.verify.result import Deviation
from export_grok.runtime.verify.steps import Step
from export_grok.runtime.verify.tolerances import TENSORS
from tests.runtime.verify.arrays import (
    ALLOWED,
    CACHES,
    FLOATS,
    HEADS,
    SIZE,
    SLOTS,
    STEP,
    TOKENS,
    Arrays,
    copied,
    layer,
    padding,
    tolerances,
    written,
)

GARBAGE = (math.nan, math.inf, -math.inf, 3e38)
ORDER = ["k_out", "v_out", "heads", "attention", "experts", "gates", "moe", "h_out"]

tokens = st.sampled_from(TOKENS)
floats = st.sampled_from(FLOATS)


def found_in(found: Arrays, wanted: Arrays, inputs: Arrays, **options: Any) -> Findings:
    return compared(found, wanted, STEP, inputs, tolerances(), **options)


def only(findings: Findings, tensor: str) -> Deviation:
    """Return the one deviation of a tensor."""
    (one,) = [one for one in findings.deviations if one.tensor == tensor]
    return one


def failed(findings: Findings) -> list[str]:
    return [one.tensor for one in findings.deviations if not one.passed]


def noisy(arrays: Arrays, size: float = 1e-4) -> Arrays:
    """Return what an engine gives that is right up to rounding."""
    random = np.random.default_rng(1)
    changed = copied(arrays)
    for name in FLOATS:
        for row, place in TOKENS:
            part = written(name, changed[name], row, place)
            part += (size * random.standard_normal(part.shape)).astype(np.float32)
    return changed


def index_of(
    name: str, wanted: Arrays, token: tuple[int, int], column: int
) -> tuple[np.intp, ...]:
    """Return where a column is in an array: gates are compared in the order of their experts."""
    if name == "gates":
        column = int(np.argsort(wanted["experts"][token])[column])
    return np.unravel_index(column, written(name, wanted[name], *token).shape)


def rms(array: NDArray[Any]) -> float:
    return math.sqrt(float(np.square(array.astype(np.float64)).mean()))


def test_the_same_arrays_deviate_by_nothing_in_the_order_of_computing() -> None:
    wanted, inputs = layer()
    findings = found_in(copied(wanted), wanted, inputs)
    assert [one.tensor for one in findings.deviations] == ORDER
    for one in findings.deviations:
        assert (one.error, one.largest, one.mean, one.median, one.share) == (0, 0, 0, 0, 0)
        assert one.passed
        assert one.step == STEP.name
    assert (findings.choices, findings.flips, findings.near_ties) == (len(TOKENS), 0, 0)


def test_the_order_is_that_of_computing_whatever_the_order_of_arrays() -> None:
    wanted, inputs = layer()
    backwards = dict(reversed(wanted.items()))
    findings = found_in(backwards, dict(sorted(wanted.items())), inputs)
    assert [one.tensor for one in findings.deviations] == ORDER
    assert [name for name in TENSORS if name in ORDER] == ORDER


def test_what_one_side_does_not_show_is_not_compared() -> None:
    wanted, inputs = layer()
    plain = {name: wanted[name] for name in ("h_out", "k_out", "v_out")}
    findings = found_in(plain, wanted, inputs)
    assert [one.tensor for one in findings.deviations] == ["k_out", "v_out", "h_out"]
    assert findings.choices == 0


# ---- what counts


@pytest.mark.parametrize("side", ["found", "wanted", "both"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_in_padding_changes_nothing(garbage: float, side: str) -> None:
    wanted, inputs = layer()
    found = noisy(wanted)
    clean = found_in(found, wanted, inputs)
    assert only(clean, "moe").error > 0
    dirty = {"found": copied(found), "wanted": copied(wanted)}
    for arrays in dirty.values() if side == "both" else [dirty[side]]:
        for row, place in padding():
            for name in (*FLOATS, "probabilities"):
                written(name, arrays[name], row, place)[...] = garbage
            arrays["experts"][row, place] = [-1, 99]
    assert found_in(dirty["found"], dirty["wanted"], inputs) == clean


def test_of_a_head_only_rows_with_tokens_count_and_each_for_its_last() -> None:
    wanted = np.random.default_rng(0).standard_normal((3, 9)).astype(np.float32)
    found = wanted.copy()
    found[2] = np.nan  # this row brought no token
    clean = compared({"logits": found}, {"logits": wanted}, STEP, {}, tolerances())
    assert only(clean, "logits").error == 0
    found[1, 5] += 2
    one = only(compared({"logits": found}, {"logits": wanted}, STEP, {}, tolerances()), "logits")
    assert one.place is not None
    assert (one.place.row, one.place.position, one.place.index) == (1, 3 + 1, (5,))
    assert one.share == pytest.approx(1 / 18)


def test_logits_of_all_tokens_are_compared_where_tokens_count() -> None:
    wanted = np.random.default_rng(0).standard_normal((3, 4, 9)).astype(np.float32)
    found = wanted.copy()
    found[1, 0, 7] += 1
    for row, place in padding():
        found[row, place] = np.inf
    one = only(compared({"logits": found}, {"logits": wanted}, STEP, {}, tolerances()), "logits")
    assert one.place is not None
    assert (one.place.row, one.place.position, one.place.index) == (1, 3, (7,))


@given(
    name=floats,
    token=tokens,
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    side=st.sampled_from(["found", "wanted", "both"]),
    statistic=st.sampled_from(["largest", "mean"]),
)
@settings(deadline=None)
def test_what_is_no_finite_number_fails_where_tokens_count(
    name: str, token: tuple[int, int], value: float, side: str, statistic: Any
) -> None:
    wanted, inputs = layer()
    sides = {"found": noisy(wanted), "wanted": copied(wanted)}
    shape = written(name, wanted[name], 0, 0).shape
    for arrays in sides.values() if side == "both" else [sides[side]]:
        written(name, arrays[name], *token)[index_of(name, wanted, token, 1)] = value
    findings = found_in(sides["found"], sides["wanted"], inputs, statistic=statistic)
    assert failed(findings) == [name]
    one = only(findings, name)
    assert one.error == math.inf
    assert one.share == pytest.approx(1 / (len(TOKENS) * math.prod(shape)))
    assert one.place is not None
    row, place = token
    assert (one.place.row, one.place.position) == (row, STEP.start[row] + place)
    assert one.place.index == tuple(int(part) for part in np.unravel_index(1, shape))


# ---- how far


def test_the_error_is_the_largest_difference_of_a_token_in_its_rms() -> None:
    wanted = np.array([[3, 4], [300, 400], [0.03, 0.04]], np.float32)
    found = wanted + np.array([[0.5, -1], [0, 0], [0, 0.02]], np.float32)
    scale = math.sqrt(12.5)
    assert token_errors(found, wanted) == pytest.approx([1 / scale, 0, 2 / scale], rel=1e-5)
    halves = [math.sqrt(0.625) / scale, 0, math.sqrt(2) / scale]
    assert token_errors(found, wanted, "mean") == pytest.approx(halves, rel=1e-5)


@given(seed=st.integers(0, 2**32), size=st.floats(1e-7, 1e3), token=tokens, name=floats)
@settings(deadline=None)
def test_both_statistics_are_what_they_are_by_hand(
    seed: int, size: float, token: tuple[int, int], name: str
) -> None:
    wanted, inputs = layer(seed)
    found = noisy(wanted)
    written(name, found[name], *token)[...] += size
    pairs = [
        (
            written(name, found[name], *token).astype(np.float64),
            written(name, wanted[name], *token).astype(np.float64),
        )
        for token in TOKENS
    ]
    largest = max(np.abs(ours - theirs).max() / rms(theirs) for ours, theirs in pairs)
    mean = np.mean([rms(ours - theirs) / rms(theirs) for ours, theirs in pairs])
    assert only(found_in(found, wanted, inputs), name).error == pytest.approx(largest)
    by_mean = found_in(found, wanted, inputs, statistic="mean")
    assert only(by_mean, name).error == pytest.approx(mean)


@given(power=st.integers(-20, 20), statistic=st.sampled_from(["largest", "mean"]))
@settings(deadline=None)
def test_the_error_has_no_unit(power: int, statistic: Any) -> None:
    wanted, inputs = layer()
    found = noisy(wanted, 1e-3)
    scale = np.float32(2.0**power)
    sides = [
        {name: array * scale if name in FLOATS else array for name, array in side.items()}
        for side in (found, wanted)
    ]
    caches = {name: inputs[name] * scale for name in CACHES.values()}
    before = found_in(found, wanted, inputs, statistic=statistic)
    after = found_in(sides[0], sides[1], inputs | caches, statistic=statistic)
    for one, other in zip(before.deviations, after.deviations, strict=True):
        assert (one.error, one.share, one.columns) == (other.error, other.share, other.columns)
        if one.place is not None and other.place is not None:
            assert one.place.index == other.place.index


@pytest.mark.parametrize("size", [2.0**-30, 1.0, 2.0**30])
@pytest.mark.parametrize("token", TOKENS)
def test_a_token_of_small_values_counts_as_much_as_one_of_large_values(
    token: tuple[int, int], size: float
) -> None:
    wanted, inputs = layer()
    part = written("h_out", wanted["h_out"], *token)
    part[...] = [1, -1, 1, -1, 1, 1]
    part *= np.float32(size)
    found = copied(wanted)
    written("h_out", found["h_out"], *token)[3] += np.float32(size / 4)
    # One of far larger values is off by more, but by a smaller part.
    other = TOKENS[TOKENS.index(token) - 1]
    for side, more in ((wanted, 0.0), (found, 2.0**34)):
        written("h_out", side["h_out"], *other)[...] = np.float32(2.0**40 + more)
    one = only(found_in(found, wanted, inputs), "h_out")
    assert one.error == 0.25
    assert not one.passed
    assert one.place is not None
    assert (one.place.row, one.place.position) == (token[0], STEP.start[token[0]] + token[1])


def test_where_nothing_is_wanted_anything_is_wrong_and_nothing_is_right() -> None:
    zeros = np.zeros((2, 5), np.float32)
    assert token_errors(zeros, zeros).tolist() == [0, 0]
    assert (token_errors(zeros + np.float32(1e-12), zeros) > 1).all()


# ---- where


@given(name=floats, token=tokens, data=st.data())
@settings(deadline=None)
def test_one_planted_difference_is_found_with_its_place_and_statistics(
    name: str, token: tuple[int, int], data: st.DataObject
) -> None:
    wanted, inputs = layer()
    shape = written(name, wanted[name], 0, 0).shape
    width = math.prod(shape)
    column = data.draw(st.integers(0, width - 1))
    found = copied(wanted)
    part, right = (written(name, side[name], *token) for side in (found, wanted))
    index = index_of(name, wanted, token, column)
    part[index] += 1
    findings = found_in(found, wanted, inputs)
    assert failed(findings) == [name]
    one = only(findings, name)
    row, place = token
    assert one.place is not None
    assert (one.place.row, one.place.position) == (row, STEP.start[row] + place)
    assert one.place.index == tuple(int(part) for part in np.unravel_index(column, shape))
    assert (one.place.value, one.place.wanted) == (part[index], right[index])
    delta = float(part[index]) - float(right[index])
    count = len(TOKENS) * width
    assert one.error == pytest.approx(delta / rms(right))
    assert one.largest == pytest.approx(delta)
    assert one.mean == pytest.approx(delta / count)
    assert one.median == 0
    assert one.share == pytest.approx(1 / count)
    assert one.tolerance == ALLOWED
    assert one.columns == (column, column)


@given(
    first=st.integers(0, 5),
    many=st.integers(1, 6),
    token=st.lists(tokens, min_size=1, unique=True),
)
@settings(deadline=None)
def test_a_block_of_columns_is_named_if_it_leaves_half_of_them_out(
    first: int, many: int, token: list[tuple[int, int]]
) -> None:
    wanted, inputs = layer()
    found = copied(wanted)
    last = min(first + many, 6)
    for row, place in token:
        found["moe"][row, place, first:last] += 1
    block = (first, last - 1) if last - first <= 3 else None
    assert only(found_in(found, wanted, inputs), "moe").columns == block


def test_what_is_within_the_tolerance_is_in_no_column_and_no_share() -> None:
    wanted, inputs = layer()
    one = only(found_in(noisy(wanted, 1e-5), wanted, inputs), "attention")
    assert one.passed
    assert 0 < one.error < ALLOWED
    assert (one.share, one.columns) == (0, None)


def test_the_tolerance_is_that_of_the_tensor_and_itself_allowed() -> None:
    wanted, inputs = layer()
    found = copied(wanted)
    found["moe"][0, 0, 0] += 1
    error = only(found_in(found, wanted, inputs), "moe").error
    for allowed, passed in ((error, True), (np.nextafter(error, 0), False)):
        findings = compared(found, wanted, STEP, inputs, tolerances(moe=float(allowed)))
        assert only(findings, "moe").passed is passed


# ---- slots of caches


def outside() -> list[tuple[int, int]]:
    """Return row and slot of all that neither a token of the step nor padding writes."""
    width = STEP.tokens.shape[1]
    return [
        (row, slot)
        for row, start in enumerate(STEP.start.tolist())
        for slot in range(SLOTS)
        if not start <= slot < start + width
    ]


@given(
    name=st.sampled_from(sorted(CACHES)),
    where=st.sampled_from(outside()),
    head=st.integers(0, HEADS - 1),
    channel=st.integers(0, SIZE - 1),
    value=st.sampled_from([math.nan, math.inf, 0.0, 7.0]),
)
@settings(deadline=None)
def test_a_slot_that_no_token_writes_must_stay_as_it_was(
    name: str, where: tuple[int, int], head: int, channel: int, value: float
) -> None:
    wanted, inputs = layer()
    found = copied(wanted)
    row, slot = where
    found[name][row, head, slot, channel] = value
    findings = found_in(found, wanted, inputs)
    assert failed(findings) == [name]
    (one,) = [one for one in findings.deviations if not one.passed]
    assert (one.error, one.tolerance) == (math.inf, 0)
    assert one.ratio == math.inf
    assert one.share == pytest.approx(1 / (len(STEP.start) * SLOTS))
    assert one.place is not None
    assert (one.place.row, one.place.position) == (row, slot)
    assert one.place.index == (head, channel)
    assert one.place.value == value or math.isnan(value)
    assert one.place.wanted == inputs[CACHES[name]][row, head, slot, channel]


def test_slots_that_only_the_reference_changed_or_that_hold_no_number_are_no_fault() -> None:
    wanted, inputs = layer()
    for row, slot in outside():
        for name, cache in CACHES.items():
            inputs[cache][row, :, slot] = np.nan
            wanted[name][row, :, slot] = np.nan
    found = copied(wanted)
    for row, slot in outside():
        wanted["k_out"][row, :, slot] = 5
    assert failed(found_in(found, wanted, inputs)) == []
    # Beside what is no number a change is seen where it is.
    row, slot = outside()[-1]
    found["k_out"][row, 1, slot, 2] = 5
    (one,) = [one for one in found_in(found, wanted, inputs).deviations if not one.passed]
    assert one.place is not None
    assert (one.place.row, one.place.position, one.place.index) == (row, slot, (1, 2))


def test_a_token_in_the_slot_beside_its_own_is_wrong_twice() -> None:
    wanted, inputs = layer()
    found = copied(wanted)
    row, start = 1, int(STEP.start[1])
    found["k_out"][row] = inputs["k_cache"][row]
    found["k_out"][row, :, start + 3 : start + 5] = wanted["k_out"][row, :, start : start + 2]
    found["k_out"][row, :, start + 4] = 9
    assert failed(found_in(found, wanted, inputs)) == ["k_out", "k_out"]


def test_without_the_caches_before_only_written_slots_are_compared() -> None:
    wanted, _ = layer()
    found = copied(wanted)
    row, slot = outside()[0]
    found["k_out"][row, :, slot] = 5
    assert failed(found_in(found, wanted, {})) == []


# ---- refused


@pytest.mark.parametrize("name", [*FLOATS, "experts", "h", "logits"])
def test_other_shapes_are_no_comparison(name: str) -> None:
    wanted, inputs = layer()
    wanted |= {"h": wanted["h_out"], "logits": wanted["h_out"]}
    found = copied(wanted)
    found[name] = found[name][..., :1]
    with pytest.raises(ValueError, match=rf"{name} has shape .*, the reference's"):
        found_in(found, wanted, inputs)


def test_a_step_without_a_token_has_nothing_to_compare() -> None:
    wanted, inputs = layer()
    none = Step(name="none", tokens=STEP.tokens, start=STEP.start, length=np.zeros(3, np.int64))
    findings = compared(noisy(wanted), wanted, none, inputs, tolerances())
    assert {one.error for one in findings.deviations} == {0}
    assert {one.place for one in findings.deviations} == {None}
