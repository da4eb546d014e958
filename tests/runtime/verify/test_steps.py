"""What is fed: every token once, in order, in uneven pieces, and never beyond the cache."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.errors import RequestError
from export_grok.runtime.verify.steps import Step, steps_of

Rows = list[list[int]]


@st.composite
def plans(draw: st.DrawFn) -> tuple[Rows, int, int, int]:
    """Return rows of other tokens each, decode, chunk, and slots: from none to spare on."""
    decode = draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    rows = [
        [1000 * row + place for place in range(length + decode)]
        for row, length in enumerate(lengths, start=1)
    ]
    slots = max(lengths) + decode + draw(st.sampled_from([0, 0, 1, 7, 40]))
    return rows, decode, draw(st.integers(1, 20)), slots


def fed(step: Step, row: int) -> list[int]:
    tokens: list[int] = step.tokens[row, : step.length[row]].tolist()
    return tokens


@given(plan=plans())
@settings(deadline=None)
def test_every_token_of_every_row_is_fed_once_in_order_from_where_the_row_was(
    plan: tuple[Rows, int, int, int],
) -> None:
    rows, decode, chunk, slots = plan
    done: Rows = [[] for _ in rows]
    for step in steps_of(rows, decode=decode, chunk=chunk, max_length=slots):
        assert step.start.tolist() == [len(row) for row in done]
        for number, row in enumerate(done):
            row += fed(step, number)
    assert done == rows


@given(plan=plans())
@settings(deadline=None)
def test_no_token_and_no_padding_lies_beyond_the_cache_or_a_chunk(
    plan: tuple[Rows, int, int, int],
) -> None:
    rows, decode, chunk, slots = plan
    for step in steps_of(rows, decode=decode, chunk=chunk, max_length=slots):
        width = step.tokens.shape[1]
        assert 1 <= width <= chunk
        assert step.length.max() == width
        assert step.start.max() + width <= slots


@given(plan=plans())
@settings(deadline=None)
def test_the_last_tokens_of_all_rows_come_one_at_a_time_and_no_others_after_them(
    plan: tuple[Rows, int, int, int],
) -> None:
    rows, decode, chunk, slots = plan
    steps = steps_of(rows, decode=decode, chunk=chunk, max_length=slots)
    pieces, singles = steps[: len(steps) - decode], steps[len(steps) - decode :]
    assert [step.name for step in pieces] == [f"prefill {n + 1}" for n in range(len(pieces))]
    assert [step.name for step in singles] == [f"decode {n + 1}" for n in range(decode)]
    for number, step in enumerate(singles):
        assert step.length.tolist() == [1] * len(rows)
        assert step.tokens[:, 0].tolist() == [row[len(row) - decode + number] for row in rows]


@given(
    lengths=st.lists(st.integers(7, 30), min_size=2, max_size=3),
    chunk=st.integers(6, 20),
)
@settings(deadline=None)
def test_rows_begin_at_different_places_after_the_first_piece(
    lengths: list[int], chunk: int
) -> None:
    rows = [list(range(length)) for length in sorted(lengths, reverse=True)]
    steps = steps_of(rows, decode=1, chunk=chunk, max_length=64)
    assert set(steps[0].start.tolist()) == {0}
    assert len(set(steps[1].start.tolist())) == len(rows)


@given(plan=plans())
@settings(deadline=None)
def test_what_counts_where_it_lies_and_what_is_last_belong_together(
    plan: tuple[Rows, int, int, int],
) -> None:
    rows, decode, chunk, slots = plan
    for step in steps_of(rows, decode=decode, chunk=chunk, max_length=slots):
        assert step.counts.sum(axis=1).tolist() == step.length.tolist()
        for row, ids in enumerate(rows):
            places = step.positions[row, step.counts[row]]
            assert [ids[place] for place in places] == fed(step, row)
            if step.length[row]:
                assert step.tokens[row, step.last[row]] == fed(step, row)[-1]
            else:
                assert step.last[row] == 0


def test_a_row_that_ends_early_brings_nothing_and_keeps_its_place() -> None:
    rows = [list(range(9)), [50]]
    steps = steps_of(rows, decode=0, chunk=4, max_length=16)
    assert [step.length.tolist() for step in steps] == [[4, 1], [4, 0], [1, 0]]
    assert [step.start.tolist() for step in steps] == [[0, 0], [4, 1], [8, 1]]
    assert not steps[1].tokens[1].any()


def test_rows_that_fill_the_cache_are_fed_to_their_end() -> None:
    rows = [list(range(16)), list(range(11)), [1, 2]]
    steps = steps_of(rows, decode=0, chunk=16, max_length=16)
    assert [int(step.length.sum()) for step in steps] == [16, 13]
    assert len(set(steps[1].start.tolist())) == 3


def test_all_of_the_same_length_and_no_slot_to_spare_is_no_endless_loop() -> None:
    rows = [list(range(20))] * 2
    steps = steps_of(rows, decode=0, chunk=16, max_length=20)
    assert np.sum([step.length for step in steps], axis=0).tolist() == [20, 20]


def test_steps_do_not_share_what_a_user_may_change() -> None:
    first, second, *_ = steps_of([[1, 2, 3, 4, 5]], decode=3, chunk=2, max_length=5)
    second.start[:] = 99
    assert first.start.tolist() == [0]


# ---- refused


@pytest.mark.parametrize("decode", [3, 4, -1])
def test_rows_without_a_token_before_those_decoded_are_told_with_their_lengths(
    decode: int,
) -> None:
    with pytest.raises(RequestError, match=rf"rows of 9, 3 tokens cannot have {decode} decoded"):
        steps_of([list(range(9)), [1, 2, 3]], decode=decode, chunk=4, max_length=16)


def test_rows_that_do_not_fit_are_told_with_length_and_slots() -> None:
    rows = [list(range(9)), [1, 2, 3]]
    assert steps_of(rows, decode=2, chunk=4, max_length=9)
    with pytest.raises(RequestError, match=r"a row of 9 tokens does not fit 8 slots.*--tokens"):
        steps_of(rows, decode=2, chunk=4, max_length=8)


def test_a_step_of_padding_only_counts_nothing() -> None:
    none = np.zeros(2, np.int64)
    step = Step(name="none", tokens=np.ones((2, 3), np.int64), start=none, length=none)
    assert not step.counts.any()
    assert step.last.tolist() == [0, 0]
