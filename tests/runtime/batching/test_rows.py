"""Rows: a prompt gets a free one, and with it all of its beginning that some row holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.runtime.batching.rows import LEAST_COPY, Rows

LONG = tuple(range(1, 2 * LEAST_COPY + 1))


def filled(*rows: tuple[int, ...], max_length: int = 64) -> Rows:
    """Return rows that hold these tokens and are free, let go in this order; () for never used."""
    found = Rows(len(rows), max_length)
    for row, tokens in enumerate(rows):
        if tokens:
            found.write(row, tokens, 0)
            found.let_go(row)
    return found


def common(one: list[int], other: list[int]) -> int:
    pairs = list(zip(one, other, strict=False))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))


def test_rows_are_given_from_the_first() -> None:
    rows = Rows(3, 8)
    assert [rows.take([5, 6]).row for _ in range(3)] == [0, 1, 2]
    assert rows.free == 0


def test_a_row_whose_tokens_all_begin_the_prompt_is_continued() -> None:
    rows = filled((1, 2), (1, 2, 3), (1, 2, 3, 4, 9))
    taken = rows.take([1, 2, 3, 4, 5])
    assert (taken.row, taken.source, taken.cached) == (1, 1, 3)


def test_a_token_of_the_prompt_is_left_to_compute() -> None:
    assert filled((1, 2, 3)).take([1, 2, 3]).cached == 2


def test_a_prompt_of_one_token_has_nothing_to_reuse() -> None:
    assert filled((1, 2), (3,)).take([1]).cached == 0


def test_a_long_beginning_is_copied_so_that_both_are_there() -> None:
    rows = filled((*LONG, 98), (50, 51), ())
    taken = rows.take([*LONG, 99])
    assert (taken.source, taken.cached) == (0, len(LONG))
    assert taken.row == 2  # that was never used
    again = rows.take([*LONG, 98, 7])
    assert (again.row, again.cached) == (0, len(LONG) + 1)


def test_a_row_that_is_in_use_is_copied_from() -> None:
    rows = Rows(2, 64)
    first = rows.take([*LONG, 70])
    rows.write(first.row, LONG, 0)
    second = rows.take([*LONG, 80])
    assert (second.row, second.source, second.cached) == (1, 0, len(LONG))


def test_a_short_beginning_is_not_worth_a_copy() -> None:
    rows = filled((*LONG[: LEAST_COPY - 1], 98), ())
    taken = rows.take([*LONG[: LEAST_COPY - 1], 99])
    assert (taken.row, taken.source, taken.cached) == (1, 1, 0)


def test_the_last_free_row_is_cut_short_where_it_is() -> None:
    rows = filled((1, 2, 3, 4, 5))
    taken = rows.take([1, 2, 3, 9])
    assert (taken.row, taken.source, taken.cached) == (0, 0, 3)
    assert rows.used_tokens == 3


def test_the_row_that_was_let_go_first_is_given_first() -> None:
    rows = filled((1, 2), (3, 4), (5, 6))
    assert [rows.take([9, 9]).row for _ in range(3)] == [0, 1, 2]


def test_what_a_row_held_when_it_failed_is_not_reused() -> None:
    rows = Rows(1, 64)
    row = rows.take(LONG).row
    rows.write(row, LONG, 0)
    rows.let_go(row, keep=False)
    assert rows.kept_tokens == 0
    assert rows.take([*LONG, 5]).cached == 0


def test_tokens_are_counted_where_they_are() -> None:
    rows = Rows(2, 64)
    row = rows.take([1, 2, 3]).row
    rows.write(row, [1, 2, 3], 0)
    assert (rows.used_tokens, rows.kept_tokens) == (3, 0)
    rows.let_go(row)
    assert (rows.used_tokens, rows.kept_tokens) == (0, 3)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), batch=st.integers(1, 4))
def test_what_is_said_to_be_held_is_held(data: st.DataObject, batch: int) -> None:
    """Whatever comes and goes, a row that is given holds the beginning it is said to hold."""
    max_length = 24
    rows = Rows(batch, max_length)
    held: list[list[int]] = [[] for _ in range(batch)]
    taken: dict[int, list[int]] = {}
    beginnings = [[1] * 20, [1] * 18 + [2] * 4, [2, 1, 2]]
    for _ in range(data.draw(st.integers(1, 25))):
        if rows.free and data.draw(st.booleans()):
            beginning = data.draw(st.sampled_from(beginnings))
            cut = data.draw(st.integers(0, len(beginning)))
            prompt = beginning[:cut] + data.draw(
                st.lists(st.integers(1, 2), min_size=1, max_size=max_length - cut - 1)
            )
            found = rows.take(prompt)
            assert found.row not in taken
            assert held[found.source][: found.cached] == prompt[: found.cached]
            assert found.cached < len(prompt)
            longest = max(common(row, prompt[:-1]) for row in held)
            assert longest - LEAST_COPY < found.cached <= longest
            held[found.row] = prompt[:]
            rows.write(found.row, prompt[found.cached :], found.cached)
            taken[found.row] = prompt
        elif taken:
            row = data.draw(st.sampled_from(sorted(taken)))
            del taken[row]
            rows.let_go(row)
        assert rows.free == batch - len(taken)
        assert rows.used_tokens == sum(map(len, taken.values()))
