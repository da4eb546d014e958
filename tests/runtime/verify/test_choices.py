"""The choice of experts: their order is free, a near tie may fall either way, else it is wrong."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.runtime.verify.comparison import Findings, compared
from export_grok.runtime.verify.result import Deviation
from tests.runtime.verify.arrays import (
    EXPERTS,
    STEP,
    TOKENS,
    Arrays,
    copied,
    layer,
    tolerances,
    top,
    written,
)

Token = tuple[int, int]

TIE = tolerances().near_tie
AFTER = ("gates", "moe", "h_out")
tokens = st.sampled_from(TOKENS)
some_tokens = st.sets(tokens)


def found_in(found: Arrays, wanted: Arrays, inputs: Arrays, **allowed: float) -> Findings:
    return compared(found, wanted, STEP, inputs, tolerances(**allowed))


def failed(findings: Findings) -> list[str]:
    return [one.tensor for one in findings.deviations if not one.passed]


def only(findings: Findings, tensor: str) -> Deviation:
    (one,) = [one for one in findings.deviations if one.tensor == tensor]
    return one


def with_probabilities(wanted: Arrays, token: Token, *ladder: float) -> list[int]:
    """Set the largest probabilities of a token; return all experts, the most probable first.

    The other experts share what is left.
    """
    order = np.argsort(-wanted["probabilities"][token])
    rest = (1 - sum(ladder)) / (EXPERTS - len(ladder))
    wanted["probabilities"][token][order] = [*ladder, *[rest] * (EXPERTS - len(ladder))]
    wanted |= top(wanted["probabilities"])
    numbers: list[int] = order.tolist()
    return numbers


def choose(found: Arrays, token: Token, *experts: int) -> None:
    """Let the engine choose others, with all that follows from it."""
    found["experts"][token] = experts
    for name in AFTER:
        written(name, found[name], *token)[...] += 3


@given(swapped=some_tokens)
@settings(deadline=None)
def test_the_order_of_experts_is_free_if_gates_have_the_same(swapped: set[Token]) -> None:
    wanted, inputs = layer()
    found = copied(wanted)
    for token in swapped:
        for name in ("experts", "gates"):
            found[name][token] = found[name][token][::-1].copy()
    findings = found_in(found, wanted, inputs)
    assert findings.flips == 0
    assert {one.error for one in findings.deviations} == {0}


@pytest.mark.parametrize("name", ["experts", "gates"])
def test_gates_that_belong_to_the_other_expert_are_wrong(name: str) -> None:
    wanted, inputs = layer()
    found = copied(wanted)
    found[name][0, 1] = found[name][0, 1][::-1].copy()
    findings = found_in(found, wanted, inputs)
    assert findings.flips == 0
    assert failed(findings) == ["gates"]
    place = only(findings, "gates").place
    assert place is not None
    assert (place.row, place.position) == (0, 1)


@given(token=tokens, rank=st.integers(2, EXPERTS - 1))
@settings(deadline=None)
def test_a_firm_choice_that_differs_is_wrong_and_so_is_what_follows(
    token: Token, rank: int
) -> None:
    wanted, inputs = layer()
    order = with_probabilities(wanted, token, 0.5, 0.3, 0.02)
    found = copied(wanted)
    choose(found, token, order[0], order[rank])
    findings = found_in(found, wanted, inputs)
    assert failed(findings) == ["experts", *AFTER]
    assert (findings.choices, findings.flips, findings.near_ties) == (len(TOKENS), 1, 0)
    one = only(findings, "experts")
    assert (one.error, one.largest) == (1, 1)
    assert one.share == pytest.approx(1 / len(TOKENS))
    assert one.place is not None
    row, place = token
    assert (one.place.row, one.place.position) == (row, STEP.start[row] + place)
    right, wrong = sorted(order[:2]), sorted([order[0], order[rank]])
    (column,) = one.place.index
    assert right[column] != wrong[column]
    assert (one.place.value, one.place.wanted) == (wrong[column], right[column])


@given(ties=some_tokens, flips=some_tokens)
@settings(deadline=None)
def test_flips_are_counted_and_only_those_near_ties_are_excused(
    ties: set[Token], flips: set[Token]
) -> None:
    wanted, inputs = layer()
    found_orders = {}
    for token in TOKENS:
        close = 0.3 - TIE / 2 if token in ties else 0.1
        found_orders[token] = with_probabilities(wanted, token, 0.4, 0.3, close)
    found = copied(wanted)
    for token in flips:
        choose(found, token, found_orders[token][0], found_orders[token][2])
    findings = found_in(found, wanted, inputs)
    firm = flips - ties
    assert findings.choices == len(TOKENS)
    assert findings.flips == len(flips)
    assert findings.near_ties == len(flips & ties)
    assert only(findings, "experts").error == len(firm)
    assert failed(findings) == (["experts", *AFTER] if firm else [])


def near(token: Token = (0, 2)) -> tuple[Arrays, Arrays, Arrays]:
    """Return found, wanted and inputs of a layer that chose the other way at a near tie."""
    wanted, inputs = layer()
    order = with_probabilities(wanted, token, 0.4, 0.3, 0.3 - TIE / 2)
    found = copied(wanted)
    choose(found, token, order[0], order[2])
    return found, wanted, inputs


@pytest.mark.parametrize("name", ["k_out", "v_out", "heads", "attention"])
def test_what_was_computed_before_a_near_tie_is_compared_there(name: str) -> None:
    found, wanted, inputs = near()
    written(name, found[name], 0, 2)[...] += 1
    assert failed(found_in(found, wanted, inputs)) == [name]


@given(name=st.sampled_from(AFTER), token=tokens.filter(lambda token: token != (0, 2)))
@settings(deadline=None)
def test_a_near_tie_excuses_no_other_token(name: str, token: Token) -> None:
    found, wanted, inputs = near()
    written(name, found[name], *token)[...] += 1
    findings = found_in(found, wanted, inputs)
    assert failed(findings) == [name]
    place = only(findings, name).place
    assert place is not None
    assert (place.row, place.position) == (token[0], STEP.start[token[0]] + token[1])


def test_a_near_tie_that_fell_the_same_way_is_compared() -> None:
    wanted, inputs = layer()
    with_probabilities(wanted, (0, 2), 0.4, 0.3, 0.3 - TIE / 2)
    found = copied(wanted)
    found["moe"][0, 2] += 1
    assert failed(found_in(found, wanted, inputs)) == ["moe"]


@pytest.mark.parametrize(("gap", "excused"), [(0.9, True), (1.1, False)])
def test_how_near_is_said_by_the_tolerances(gap: float, excused: bool) -> None:
    wanted, inputs = layer()
    order = with_probabilities(wanted, (0, 2), 0.4, 0.3, 0.3 - gap * TIE)
    found = copied(wanted)
    choose(found, (0, 2), order[0], order[2])
    assert failed(found_in(found, wanted, inputs)) == ([] if excused else ["experts", *AFTER])


# The second and third are nearly as probable; the first and the others are not.
@pytest.mark.parametrize("ranks", [(0, 3), (1, 2), (2, 3), (0, 7), (5, 6)])
def test_a_near_tie_between_two_experts_excuses_no_other_one(ranks: tuple[int, int]) -> None:
    wanted, inputs = layer()
    order = with_probabilities(wanted, (0, 2), 0.4, 0.25, 0.25 - TIE / 2, 0.05)
    found = copied(wanted)
    choose(found, (0, 2), *(order[rank] for rank in ranks))
    findings = found_in(found, wanted, inputs)
    assert findings.near_ties == 0
    assert failed(findings) == ["experts", *AFTER]


@pytest.mark.parametrize("ranks", [(0, 2), (1, 2), (1, 3), (2, 3)])
def test_among_four_that_are_nearly_the_same_any_two_may_be_chosen(
    ranks: tuple[int, int],
) -> None:
    wanted, inputs = layer()
    order = with_probabilities(wanted, (0, 2), 0.243, 0.242, 0.241, 0.24)
    found = copied(wanted)
    choose(found, (0, 2), *(order[rank] for rank in ranks))
    findings = found_in(found, wanted, inputs)
    assert (findings.flips, findings.near_ties) == (1, 1)
    assert failed(findings) == []


@pytest.mark.parametrize("experts", [(-1, 3), (3, EXPERTS), (2**40, -(2**40))])
def test_experts_that_do_not_exist_are_wrong_however_near_a_tie_is(
    experts: tuple[int, int],
) -> None:
    wanted, inputs = layer()
    wanted["probabilities"][...] = 1 / EXPERTS
    found = copied(wanted)
    choose(found, (0, 2), *experts)
    assert failed(found_in(found, wanted, inputs)) == ["experts", *AFTER]


def test_one_expert_chosen_twice_is_wrong_however_near_a_tie_is() -> None:
    wanted, inputs = layer()
    wanted["probabilities"][...] = 1 / EXPERTS
    found = copied(wanted)
    choose(found, (0, 2), 4, 4)
    assert failed(found_in(found, wanted, inputs)) == ["experts", *AFTER]


def test_it_is_the_reference_that_is_undecided_not_the_engine() -> None:
    wanted, inputs = layer()
    order = with_probabilities(wanted, (0, 2), 0.5, 0.3, 0.02)
    found = copied(wanted)
    choose(found, (0, 2), order[0], order[2])
    found["probabilities"][0, 2] = 1 / EXPERTS
    assert failed(found_in(found, wanted, inputs)) == ["experts", *AFTER]


@pytest.mark.parametrize("shown", [None, math.nan])
def test_where_the_reference_shows_no_probabilities_nothing_is_excused(
    shown: float | None,
) -> None:
    found, wanted, inputs = near()
    if shown is None:
        del wanted["probabilities"]
    else:
        wanted["probabilities"][0, 2] = shown
    findings = found_in(found, wanted, inputs)
    assert (findings.flips, findings.near_ties) == (1, 0)
    assert failed(findings) == ["experts", *AFTER]


def test_where_all_experts_are_chosen_there_is_no_choice() -> None:
    wanted, inputs = layer()
    wanted["experts"] = np.tile(np.arange(EXPERTS), (3, 4, 1))
    wanted["gates"] = wanted["probabilities"]
    findings = found_in(copied(wanted), wanted, inputs)
    assert (findings.choices, findings.flips) == (len(TOKENS), 0)
    assert failed(findings) == []


def test_so_many_firm_flips_are_no_fault_as_are_allowed() -> None:
    wanted, inputs = layer()
    found = copied(wanted)
    for token in TOKENS[:2]:
        order = np.argsort(-wanted["probabilities"][token])
        found["experts"][token] = [order[0], order[-1]]
    for allowed, wrong in ((1.0, ["experts"]), (2.0, [])):
        assert failed(found_in(found, wanted, inputs, experts=allowed)) == wrong


def test_if_every_token_is_excused_nothing_that_follows_is_compared() -> None:
    wanted, inputs = layer()
    wanted["probabilities"][...] = 1 / EXPERTS
    found = copied(wanted)
    for token in TOKENS:
        right = set(wanted["experts"][token].tolist())
        choose(found, token, *[expert for expert in range(EXPERTS) if expert not in right][:2])
    findings = found_in(found, wanted, inputs)
    assert findings.near_ties == len(TOKENS)
    assert [only(findings, name).place for name in AFTER] == [None] * 3
