"""Rows that lie side by side when they are asked for, and hold what they would without moves."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.engines.ort.places import Places

T = 6


@dataclass
class Call:
    """Rows that get tokens: from where on, and how many."""

    rows: list[int]
    start: list[int]
    width: int


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, list[Call]]:
    """Return a number of rows and calls that leave no gap in any of them."""
    rows = draw(st.integers(1, 7))
    held = [0] * rows
    calls = []
    for _ in range(draw(st.integers(1, 12))):
        chosen = draw(st.permutations(range(rows)))[: draw(st.integers(1, rows))]
        width = draw(st.integers(1, T))
        start = [draw(st.integers(0, min(held[row], T - width))) for row in chosen]
        for row, first in zip(chosen, start, strict=True):
            held[row] = first + width
        calls.append(Call(chosen, start, width))
    return rows, calls


def numbers(rows: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(rows, np.int64)


@settings(deadline=None)
@given(script=scripts())
def test_after_any_calls_every_row_holds_what_it_would_without_moves(
    script: tuple[int, list[Call]],
) -> None:
    count, calls = script
    places = Places(count)
    unmoved: list[list[int]] = [[] for _ in range(count)]
    cache = [[-1] * T for _ in range(count)]  # by place
    for number, call in enumerate(calls):
        first, swaps = places.gather(numbers(call.rows))
        touched = [place for swap in swaps for place in swap.places]
        assert len(set(touched)) == len(touched)
        for swap in swaps:
            (one, other), (held, others) = swap.places, swap.lengths
            here, there = cache[one][:held], cache[other][:others]
            cache[one] = there + [-1] * (T - others)  # nothing more is moved
            cache[other] = here + [-1] * (T - held)
        order = places.order(first, numbers(call.rows))
        assert sorted(order.tolist()) == list(range(len(call.rows)))
        for place, index in enumerate(order.tolist(), start=first):
            row, begin = call.rows[index], call.start[index]
            assert places.of(row) == place
            new = [100 * number + token for token in range(call.width)]
            cache[place][begin : begin + call.width] = new
            unmoved[row] = unmoved[row][:begin] + new
        places.holds(numbers(call.rows), numbers(call.start) + call.width)
        for row, tokens in enumerate(unmoved):
            assert cache[places.of(row)][: len(tokens)] == tokens


@given(data=st.data())
def test_rows_that_lie_side_by_side_are_not_moved(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    first = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(first + 1, count))
    rows = data.draw(st.permutations(range(first, end)))
    assert Places(count).gather(numbers(rows)) == (first, [])


@given(data=st.data())
def test_two_groups_that_take_turns_are_moved_in_their_first_turns_only(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(2, 9))
    places = Places(count)
    places.holds(np.arange(count), numbers([data.draw(st.integers(0, 9)) for _ in range(count)]))
    shuffled = data.draw(st.permutations(range(count)))
    cut = data.draw(st.integers(1, count - 1))
    end = data.draw(st.integers(cut + 1, count))
    groups = numbers(shuffled[:cut]), numbers(shuffled[cut:end])
    for _ in range(2):
        for group in groups:
            places.gather(group)
    for group in groups:
        _, swaps = places.gather(group)
        assert swaps == []


@pytest.mark.parametrize(("short", "end"), [(0, 0), (3, 2)])
def test_the_end_where_fewer_tokens_are_moved_is_taken(short: int, end: int) -> None:
    places = Places(4)
    lengths = numbers([9, 9, 9, 9])
    lengths[short] = 1  # is driven out
    places.holds(np.arange(4), lengths)
    rows = numbers([1, 3] if short == 0 else [0, 2])
    first, swaps = places.gather(rows)
    assert first == end
    assert [sum(swap.lengths) for swap in swaps] == [10]


def test_one_that_was_just_served_is_not_driven_out() -> None:
    places = Places(4)
    places.holds(np.arange(4), numbers([1, 50, 50, 50]))
    places.gather(numbers([0]))
    first, _ = places.gather(numbers([1, 3]))  # to drive out row 0 would be cheaper by far
    assert first == 2
    assert places.of(0) == 0
