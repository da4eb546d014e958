"""Running free: what is said is what steps ask for, and what is judged is what can be by hand."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.runtime.verify.free_run import Heard, judge, lead, listen
from export_grok.runtime.verify.result import FreeRun
from export_grok.runtime.verify.steps import Step, steps_of
from export_grok.runtime.verify.tolerances import BFLOAT16_FACTOR
from tests.runtime.fake_session import FakeSession, logits_after
from tests.runtime.small_model import SMALL

Floats = NDArray[np.float32]
Wide = NDArray[np.float64]

VOCABULARY = SMALL.vocab_size
TOLERANCE = 1e-3


def some_rows(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]


def steps_for(rows: list[list[int]], decode: int = 0, chunk: int = 16) -> tuple[Step, ...]:
    longest = max(len(row) for row in rows)
    return steps_of(rows, decode=decode, chunk=chunk, max_length=longest)


def places(steps: Sequence[Step]) -> Iterator[tuple[int, int]]:
    """Yield row and position of every token that counts, in the order of logits."""
    for step in steps:
        for row, place in np.argwhere(step.counts):
            yield int(row), int(step.start[row] + place)


# ---- listening


class Asked(FakeSession):
    """Tells which of its methods was called with how many tokens."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[str, int]] = []

    def forward(self, tokens: Any, start: Any, last: Any, rows: Any = None) -> Any:
        self.asked.append(("last", tokens.shape[1]))
        return super().forward(tokens, start, last, rows)

    def forward_all(self, tokens: Any, start: Any) -> Any:
        self.asked.append(("all", tokens.shape[1]))
        return super().forward_all(tokens, start)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    decode=st.integers(0, 4),
    greedy=st.integers(0, 4),
    chunk=st.integers(1, 8),
)
@settings(deadline=None, max_examples=60)
def test_a_session_is_heard_at_every_token_and_goes_on_by_the_likeliest_one(
    lengths: list[int], decode: int, greedy: int, chunk: int
) -> None:
    rows = some_rows([length + decode for length in lengths])
    prompts = [row[: len(row) - decode] for row in rows]
    # No more slots than the last greedy token needs: none is written after it.
    slots = max(max(len(row) for row in rows), max(lengths) + max(greedy - 1, 0))
    session = Asked(SMALL, batch=len(rows), max_length=slots)
    steps = steps_of(rows, decode=decode, chunk=chunk, max_length=slots)
    done: list[int] = []
    heard = listen(session, steps, prompts, greedy=greedy, chunk=chunk, advance=done.append)

    said = np.concatenate(heard.logits)
    wanted = [logits_after(rows[row][: at + 1], VOCABULARY) for row, at in places(steps)]
    assert np.array_equal(said, wanted)
    assert sum(done) == len(steps) + greedy

    assert heard.greedy.shape == heard.margins.shape == (len(rows), greedy)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for number in range(greedy):
            logits = logits_after(text, VOCABULARY)
            assert heard.greedy[row, number] == logits.argmax()
            first, second = np.sort(logits.astype(np.float64))[[-1, -2]]
            scale = math.sqrt(float(np.square(logits.astype(np.float64)).mean()))
            assert heard.margins[row, number] == pytest.approx((first - second) / scale)
            text.append(int(logits.argmax()))


def test_pieces_ask_for_all_logits_and_single_tokens_for_those_of_one_row() -> None:
    rows = some_rows([12, 9])
    steps = steps_for(rows, decode=3, chunk=4)
    session = Asked(SMALL, batch=2, max_length=12)
    listen(session, steps, rows, greedy=0, chunk=4)
    widths = [step.tokens.shape[1] for step in steps]
    assert session.asked == [("last" if width == 1 else "all", width) for width in widths]
    assert widths[0] == 4


@given(many=st.integers(1, 5), seed=st.integers(0, 1000), power=st.integers(-10, 10))
@settings(deadline=None)
def test_the_lead_is_that_of_the_likeliest_before_the_next_and_has_no_unit(
    many: int, seed: int, power: int
) -> None:
    logits = np.random.default_rng(seed).standard_normal((many, 7)).astype(np.float32)
    ordered = np.sort(logits.astype(np.float64), axis=-1)
    by_hand = (ordered[:, -1] - ordered[:, -2]) / np.sqrt(np.square(ordered).mean(axis=-1))
    assert lead(logits) == pytest.approx(by_hand)
    assert np.array_equal(lead(logits * np.float32(2.0**power)), lead(logits))


def test_two_that_are_the_same_have_no_lead() -> None:
    assert lead(np.array([[1, 5, 5, 0], [0, 0, 0, 0]], np.float32)).tolist() == [0, 0]


# ---- judging: 120 positions of three rows, with likeliest tokens that are well ahead

ROWS = some_rows([60, 40, 20], seed=3)
STEPS = steps_for(ROWS, decode=4)
PLACES = list(places(STEPS))
COUNT = len(PLACES)
GREEDY = 6


def some_logits(seed: int = 5) -> Floats:
    logits = np.random.default_rng(seed).standard_normal((COUNT, VOCABULARY)).astype(np.float32)
    logits[np.arange(COUNT), logits.argmax(-1)] += 1
    return logits


def said(logits: Floats, steps: Sequence[Step]) -> tuple[Floats, ...]:
    """Return the logits of all positions step by step."""
    borders = np.cumsum([int(step.length.sum()) for step in steps])[:-1]
    return tuple(np.split(logits, borders))


def heard_of(logits: Floats, steps: Sequence[Step] = STEPS, **fields: Any) -> Heard:
    values: dict[str, Any] = {
        "logits": said(logits, steps),
        "greedy": np.zeros((3, GREEDY), np.int64),
        "margins": np.full((3, GREEDY), 0.5),
    }
    return Heard(**(values | fields))


def judged(
    ours: Floats | Heard, theirs: Floats | Heard | None = None, floor: FreeRun | None = None
) -> FreeRun:
    found, wanted = (
        side if isinstance(side, Heard) else heard_of(side)
        for side in (ours, some_logits() if theirs is None else theirs)
    )
    return judge(STEPS, ROWS, found, wanted, tolerance=TOLERANCE, floor=floor)


def targets() -> list[int | None]:
    """Return the token behind each position; None at the end of a row."""
    return [ROWS[row][at + 1] if at + 1 < len(ROWS[row]) else None for row, at in PLACES]


def probabilities(logits: Floats) -> Wide:
    wide = np.exp(logits.astype(np.float64))
    found: Wide = wide / wide.sum(axis=-1, keepdims=True)
    return found


def test_the_same_logits_break_no_rule() -> None:
    run = judged(some_logits())
    assert run.passed
    assert run.failures == ()
    assert (run.positions, run.allowed, run.beyond) == (120, 1, 0)
    assert (run.mean_error, set(run.error.values())) == (0, {0.0})
    assert (run.top_1, run.firm, run.undecided) == (1, 0, 0)
    assert (run.kl_mean, run.kl_max) == (0, 0)
    assert run.perplexity == run.perplexity_wanted
    assert (run.greedy, run.parted, run.margin) == (GREEDY, None, None)


@given(seed=st.integers(0, 1000), size=st.floats(1e-6, 3))
@settings(deadline=None)
def test_every_figure_is_what_it_is_by_hand(seed: int, size: float) -> None:
    theirs = some_logits(seed)
    noise = np.random.default_rng(seed + 1).standard_normal(theirs.shape)
    ours = theirs + (size * noise).astype(np.float32)
    run = judged(ours, theirs)
    off = ours.astype(np.float64) - theirs
    scale = np.sqrt(np.square(theirs.astype(np.float64)).mean(axis=-1))
    errors = np.abs(off).max(axis=-1) / scale
    for step, error in zip(STEPS, said(errors, STEPS), strict=True):
        assert run.error[step.name] == pytest.approx(error.max())
    assert run.mean_error == pytest.approx((np.sqrt(np.square(off).mean(-1)) / scale).mean())
    assert run.beyond == (errors > TOLERANCE).sum()
    differ = ours.argmax(-1) != theirs.argmax(-1)
    assert run.top_1 == pytest.approx(1 - differ.mean())
    assert run.firm + run.undecided == differ.sum()
    p, q = probabilities(theirs), probabilities(ours)
    divergence = (p * np.log(p / q)).sum(axis=-1)
    assert run.kl_mean == pytest.approx(divergence.mean(), abs=1e-12)
    assert run.kl_max == pytest.approx(divergence.max(), abs=1e-12)
    assert 0 <= run.kl_mean <= run.kl_max
    for found, chances in ((run.perplexity, q), (run.perplexity_wanted, p)):
        nats = [
            -math.log(chances[number, token])
            for number, token in enumerate(targets())
            if token is not None
        ]
        assert len(nats) == COUNT - 3
        assert found == pytest.approx(math.exp(math.fsum(nats) / len(nats)))


def test_divergence_is_from_the_reference_to_the_engine_and_not_back() -> None:
    sure, unsure = np.zeros((2, COUNT, VOCABULARY), np.float32)
    sure[:, 0] = 2
    one, other = judged(unsure, sure).kl_mean, judged(sure, unsure).kl_mean
    p, q = probabilities(sure)[0], probabilities(unsure)[0]
    assert one == pytest.approx((p * np.log(p / q)).sum())
    assert other == pytest.approx((q * np.log(q / p)).sum())
    assert one != pytest.approx(other, rel=0.1)


@pytest.mark.parametrize("size", [1e2, 1e30])
def test_large_logits_give_figures_without_a_word(size: float) -> None:
    large = some_logits() * np.float32(size)
    run = judged(large, large)
    assert (run.kl_mean, run.beyond, run.firm) == (0, 0, 0)
    assert run.perplexity == run.perplexity_wanted > 1e6


def test_one_more_logit_for_all_tokens_changes_no_distribution() -> None:
    run = judged(some_logits() + np.float32(4))
    assert run.kl_max == pytest.approx(0, abs=1e-9)
    assert run.perplexity == pytest.approx(run.perplexity_wanted)
    assert run.top_1 == 1
    assert run.beyond == COUNT  # but the logits are others
    assert not run.passed


@pytest.mark.parametrize(("row", "end"), [(0, 60), (1, 40), (2, 20)])
def test_behind_the_last_token_of_a_row_there_is_none_to_foresee(row: int, end: int) -> None:
    ours = some_logits()
    last = PLACES.index((row, end - 1))
    ours[last] = ours[last][::-1].copy()
    assert judged(ours).perplexity == judged(ours).perplexity_wanted
    ours = some_logits()
    before = PLACES.index((row, end - 2))
    ours[before, ROWS[row][end - 1]] += 1
    assert judged(ours).perplexity < judged(ours).perplexity_wanted


# ---- rules


def off_at(*numbers: int, size: float = 0.02) -> Floats:
    """Return logits that are off at some positions, where it changes no likeliest token."""
    logits = some_logits()
    for number in numbers:
        logits[number, logits[number].argmin()] -= np.float32(size)
    return logits


@given(number=st.integers(0, COUNT - 1), other=st.integers(0, COUNT - 1))
@settings(deadline=None)
def test_of_a_hundred_positions_one_may_be_off_and_not_two(number: int, other: int) -> None:
    assert judged(off_at(number)).passed
    if other == number:
        return
    run = judged(off_at(number, other))
    assert run.beyond == 2
    (failure,) = run.failures
    assert failure.startswith("the logits of 2 of 120 positions are off by more than 1.0e-03 of")
    assert "and 1 may be" in failure
    worst = max(run.error, key=lambda step: run.error[step])
    assert f"most in {worst}, by {run.error[worst]:.1e}" in failure


def test_of_less_than_a_hundred_positions_none_may_be_off() -> None:
    rows = [row[:39] for row in ROWS]
    steps = steps_for(rows)
    count = sum(len(row) for row in rows)
    assert count == 98
    ours, theirs = (heard_of(logits[:count], steps) for logits in (off_at(7), some_logits()))
    run = judge(steps, rows, ours, theirs, tolerance=TOLERANCE)
    assert (run.beyond, run.allowed) == (1, 0)
    assert not run.passed


def swapped(numbers: Sequence[int], ahead: float) -> tuple[Floats, Floats]:
    """Return logits where two tokens lead, by so much of the rms, and those the other way round.

    No token that is foreseen is among the two.
    """
    theirs = some_logits()
    for number in numbers:
        token = targets()[number]
        first, second, *_ = (other for other in range(VOCABULARY) if other != token)
        theirs[number, [first, second]] = 4.0
        scale = math.sqrt(float(np.square(theirs[number].astype(np.float64)).mean()))
        theirs[number, second] -= np.float32(ahead * scale)
    ours = theirs.copy()
    for number in numbers:
        first, second = np.sort(np.argsort(theirs[number])[-2:])
        ours[number, [first, second]] = theirs[number, [second, first]]
    return ours, theirs


@pytest.mark.parametrize(("ahead", "undecided"), [(0.0005, True), (0.009, True), (0.011, False)])
def test_another_likeliest_token_is_a_fault_where_the_reference_was_decided(
    ahead: float, undecided: bool
) -> None:
    numbers = [3, 50, 99]
    ours, theirs = swapped(numbers, ahead)
    run = judge(STEPS, ROWS, heard_of(ours), heard_of(theirs), tolerance=1.0)
    assert run.top_1 == pytest.approx(1 - 3 / COUNT)
    assert (run.undecided, run.firm) == ((3, 0) if undecided else (0, 3))
    assert run.passed is undecided
    if not undecided:
        assert run.failures == (
            "another token is the likeliest in 3 of 120 positions where the reference was not "
            "undecided, and 1 may be",
        )


def test_one_firm_position_of_a_hundred_may_have_another_likeliest_token() -> None:
    ours, theirs = swapped([50], 0.5)
    run = judge(STEPS, ROWS, heard_of(ours), heard_of(theirs), tolerance=1.0)
    assert (run.firm, run.allowed) == (1, 1)
    assert run.passed


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("size", "passed"), [(5e-4, True), (2e-3, False)])
def test_perplexity_must_be_that_of_the_reference_in_both_directions(
    size: float, passed: bool, sign: int
) -> None:
    theirs = np.zeros((COUNT, VOCABULARY), np.float32)
    ours = theirs.copy()
    for number, token in enumerate(targets()):
        if token is not None:
            ours[number, token] += np.float32(sign * size * VOCABULARY / (VOCABULARY - 1))
    theirs[:, 0] += np.float32(1e-9)
    run = judge(STEPS, ROWS, heard_of(ours), heard_of(theirs), tolerance=math.inf)
    assert abs(run.perplexity / run.perplexity_wanted - 1) == pytest.approx(size, rel=0.05)
    named = [failure for failure in run.failures if failure.startswith("perplexity is")]
    assert bool(named) is not passed


@given(
    number=st.integers(0, COUNT - 1),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    with_floor=st.booleans(),
)
@settings(deadline=None)
def test_a_logit_that_is_no_finite_number_is_never_excused(
    number: int, value: float, with_floor: bool
) -> None:
    ours = some_logits()
    ours[number, 3] = value
    run = judged(ours, floor=judged(ours) if with_floor else None)
    name = next(step for step, error in run.error.items() if math.isinf(error))
    assert run.failures == (f"logits in {name} are not finite numbers",)


# ---- greedy answers


def parted_at(*cells: tuple[int, int, float]) -> FreeRun:
    """Return a run whose greedy answers part at rows and numbers, with the reference's lead."""
    greedy, margins = np.zeros((3, GREEDY), np.int64), np.full((3, GREEDY), 0.5)
    for row, number, margin in cells:
        greedy[row, number:] = 1  # another token leads to others
        margins[row, number] = margin
    return judged(heard_of(some_logits(), greedy=greedy), heard_of(some_logits(), margins=margins))


@given(row=st.integers(0, 2), number=st.integers(0, GREEDY - 1))
@settings(deadline=None)
def test_greedy_answers_may_part_at_a_near_tie_and_nowhere_else(row: int, number: int) -> None:
    tie, firm = parted_at((row, number, 9e-3)), parted_at((row, number, 0.25))
    assert tie.parted == firm.parted == (row, number)
    assert (tie.margin, firm.margin) == (9e-3, 0.25)
    assert tie.passed
    assert firm.failures == (
        "greedy answers part where the reference was not undecided: its token was ahead by 0.25 "
        "of the logits' rms",
    )


def test_behind_a_near_tie_a_row_is_another_text() -> None:
    run = parted_at((1, 2, 1e-3))
    # The next tokens differ too, and the reference was sure of its own.
    assert run.passed
    assert run.parted == (1, 2)


@pytest.mark.parametrize("number", range(GREEDY))
def test_a_near_tie_in_one_row_excuses_no_other_row(number: int) -> None:
    run = parted_at((0, 1, 1e-3), (2, number, 0.3))
    assert run.parted == (2, number)
    assert not run.passed


def test_of_several_rows_that_part_at_near_ties_the_first_is_told() -> None:
    run = parted_at((0, 4, 1e-3), (2, 1, 9e-3), (1, 1, 5e-3))
    assert (run.parted, run.margin) == ((1, 1), 5e-3)
    assert run.passed


# ---- beside a floor


def noisy(size: float, seed: int = 11) -> Floats:
    logits = some_logits()
    noise = np.random.default_rng(seed).standard_normal(logits.shape)
    return logits + (size * noise).astype(np.float32)


def floor_of(size: float = 0.05) -> FreeRun:
    return judged(noisy(size))


def test_beside_a_floor_it_is_not_held_to_float32() -> None:
    floor = floor_of()
    assert not floor.passed
    run = judged(noisy(0.05, seed=12), floor=floor)
    assert run.beyond > run.allowed
    assert run.passed
    assert run.floor is floor


def test_three_times_the_noise_of_roundings_is_too_much() -> None:
    run = judged(noisy(0.15), floor=floor_of())
    told = [failure.split(" is ")[0] for failure in run.failures]
    assert "the logits' mean error" in told
    assert "the mean KL divergence" in told
    assert all("and 2 times that is allowed" in failure for failure in run.failures)


def far_from(run: FreeRun) -> float:
    return abs(math.log(run.perplexity / run.perplexity_wanted))


Change = Callable[[FreeRun, float], FreeRun]

# How the floor is made to have so much of what a rule speaks of, and what else the rule allows.
RULES: dict[str, tuple[Callable[[FreeRun], float], Change, Callable[[FreeRun], float]]] = {
    "the logits' mean error": (
        lambda run: run.mean_error,
        lambda floor, part: dataclasses.replace(floor, mean_error=part),
        lambda floor: 0.0,
    ),
    "the mean KL divergence": (
        lambda run: run.kl_mean,
        lambda floor, part: dataclasses.replace(floor, kl_mean=part),
        lambda floor: 0.0,
    ),
    "the share of positions": (
        lambda run: 1 - run.top_1,
        lambda floor, part: dataclasses.replace(floor, top_1=1 - part),
        lambda floor: 1 / COUNT,  # one position more is chance
    ),
    "the perplexity's distance": (
        far_from,
        lambda floor, part: dataclasses.replace(
            floor, perplexity=floor.perplexity_wanted * math.exp(part)
        ),
        lambda floor: 2 * floor.mean_error,
    ),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("more", "passed"), [(1.001, True), (0.999, False)])
def test_each_rule_allows_twice_what_roundings_do(name: str, more: float, passed: bool) -> None:
    value_of, change, extra = RULES[name]
    ours = noisy(1.0, seed=13)
    run = judged(ours)
    # All the others are allowed what they need.
    floor = dataclasses.replace(
        run, mean_error=run.mean_error / 1.5, kl_mean=run.kl_mean, top_1=run.top_1
    )
    if name == "the perplexity's distance":
        floor = dataclasses.replace(floor, mean_error=far_from(run) / 8)
    spare = extra(floor)
    assert value_of(run) > spare
    floor = change(floor, more * (value_of(run) - spare) / BFLOAT16_FACTOR)
    failures = judged(ours, floor=floor).failures
    assert any(failure.startswith(name) for failure in failures) is not passed


@pytest.mark.parametrize("field", ["mean_error", "kl_mean", "perplexity"])
def test_a_floor_without_a_number_excuses_nothing(field: str) -> None:
    none: dict[str, Any] = {field: math.nan}
    floor = dataclasses.replace(floor_of(), **none)
    assert not judged(noisy(0.05, seed=12), floor=floor).passed
