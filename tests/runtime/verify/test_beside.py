"""An engine of another dtype may be off by as much as roundings alone, twice, and by no more."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_grok.runtime.verify.comparison import Findings, beside
from export_grok.runtime.verify.result import Deviation
from export_grok.runtime.verify.tolerances import BFLOAT16_FACTOR

ALLOWED = 1e-3

noises = st.floats(0, 1, allow_nan=False)


def deviation(tensor: str, error: float, number: int = 0, allowed: float = ALLOWED) -> Deviation:
    return Deviation(
        tensor=tensor,
        step=f"decode {number}",
        error=error,
        tolerance=allowed,
        largest=error,
        mean=error,
        median=error,
        share=0.0,
        columns=None,
        place=None,
    )


def findings(errors: Sequence[float], tensor: str = "moe") -> list[Findings]:
    """Return one step after the other with these errors of one tensor."""
    return [
        Findings(deviations=(deviation(tensor, error, number),), choices=3, flips=2, near_ties=1)
        for number, error in enumerate(errors)
    ]


def tolerances(judged: Sequence[Findings]) -> list[float]:
    return [one.tolerance for step in judged for one in step.deviations]


def passed(judged: Sequence[Findings]) -> list[bool]:
    return [one.passed for step in judged for one in step.deviations]


@given(floor=st.lists(noises, min_size=1, max_size=6))
def test_the_tolerance_is_the_usual_one_and_twice_the_noise_of_the_step_or_of_all(
    floor: list[float],
) -> None:
    usual = math.fsum(floor) / len(floor)
    judged = beside(findings([0.0] * len(floor)), findings(floor))
    wanted = [ALLOWED + BFLOAT16_FACTOR * max(noise, usual) for noise in floor]
    assert tolerances(judged) == pytest.approx(wanted)


@given(floor=st.lists(noises, min_size=1, max_size=6))
def test_who_rounds_as_the_original_does_passes(floor: list[float]) -> None:
    assert all(passed(beside(findings(floor), findings(floor))))


def test_a_step_where_roundings_happen_to_do_little_is_allowed_the_usual_noise() -> None:
    floor = [0.3, 0.3, 0.0]
    assert passed(beside(findings([0.3, 0.3, 0.35]), findings(floor))) == [True, True, True]
    assert passed(beside(findings([0.3, 0.3, 0.45]), findings(floor))) == [True, True, False]


def test_a_step_where_roundings_do_much_is_allowed_as_much() -> None:
    floor = [0.0, 0.0, 0.3]
    assert passed(beside(findings([0.1, 0.1, 0.55]), findings(floor))) == [True, True, True]
    assert passed(beside(findings([0.1, 0.25, 0.65]), findings(floor))) == [True, False, False]


def test_noise_of_one_tensor_excuses_no_other() -> None:
    found = [Findings(deviations=(deviation("heads", 0.1), deviation("moe", 0.1)))]
    floor = [Findings(deviations=(deviation("heads", 0.2), deviation("moe", 0.0)))]
    assert passed(beside(found, floor)) == [True, False]


def test_what_the_floor_does_not_show_is_held_to_the_usual_tolerance() -> None:
    found = [Findings(deviations=(deviation("heads", 0.1), deviation("moe", 0.1)))]
    floor = [Findings(deviations=(deviation("heads", 0.2),))]
    assert tolerances(beside(found, floor))[1] == ALLOWED


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_roundings_that_leave_no_number_excuse_nothing(broken: float) -> None:
    floor = findings([0.1, broken])
    assert tolerances(beside(findings([0.0, 0.0]), floor)) == pytest.approx([ALLOWED + 0.2] * 2)
    assert passed(beside(findings([0.1, math.inf]), floor)) == [True, False]
    assert passed(beside(findings([math.inf]), findings([broken]))) == [False]


def test_a_slot_that_was_changed_stays_a_fault_whatever_roundings_do() -> None:
    touched = deviation("k_out", math.inf, allowed=0.0)
    found = [Findings(deviations=(deviation("k_out", 0.1), touched))]
    for floor in (
        [Findings(deviations=(deviation("k_out", 0.3),))],
        [Findings(deviations=(deviation("k_out", 0.3), touched))],
    ):
        assert passed(beside(found, floor)) == [True, False]


def test_all_else_stays_as_it_was_found() -> None:
    found = findings([0.2, 0.7])
    judged = beside(found, findings([0.1, 0.1]))
    for before, after in zip(found, judged, strict=True):
        one, other = before.deviations[0], after.deviations[0]
        assert dataclasses.replace(other, tolerance=one.tolerance) == one
        assert dataclasses.replace(after, deviations=before.deviations) == before


def test_steps_belong_together() -> None:
    with pytest.raises(ValueError, match="shorter"):
        beside(findings([0.1, 0.1]), findings([0.1]))
