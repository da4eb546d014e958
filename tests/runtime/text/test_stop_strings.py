"""A text ends at the first stop string, however it comes in pieces: held to the definition."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.errors import RequestError
from export_grok.runtime.text.stop_strings import StopStrings

# Few letters, so that strings overlap, contain and begin one another.
words = st.lists(st.text("ab", min_size=1, max_size=5) | st.text("abc", min_size=1), max_size=5)
pieces = st.lists(st.text("abc", max_size=6), max_size=12)
many = settings(deadline=None, max_examples=500)


def ended(text: str, strings: list[str]) -> str | None:
    """Return what is before the first string that is complete in `text`, None without one."""
    for end in range(1, len(text) + 1):
        if ending := [string for string in strings if text[:end].endswith(string)]:
            return text[: end - max(map(len, ending))]
    return None


def held_back(text: str, strings: list[str]) -> str:
    """Return the longest end of `text` that begins a string."""
    ends = (text[begin:] for begin in range(len(text) + 1))
    return next(end for end in ends if not end or any(s.startswith(end) for s in strings))


@many
@given(strings=words, pieces=pieces)
def test_what_is_given_out_is_the_text_before_the_first_string_that_is_complete(
    strings: list[str], pieces: list[str]
) -> None:
    stop = StopStrings(strings)
    given_out = "".join(map(stop.push, pieces)) + stop.finish()
    text = "".join(pieces)
    before = ended(text, strings)
    assert stop.stopped == (before is not None)
    assert given_out == (text if before is None else before)


@many
@given(strings=words, pieces=pieces)
def test_what_may_begin_a_string_is_held_back_and_nothing_else_ever(
    strings: list[str], pieces: list[str]
) -> None:
    stop = StopStrings(strings)
    given_out = ""
    for text in itertools.accumulate(pieces):
        given_out += stop.push(text[len(text) - len(pieces[0]) :])
        pieces = pieces[1:]
        before = ended(text, strings)
        if before is not None:
            assert (stop.stopped, given_out) == (True, before)
        else:
            assert not stop.stopped
            assert given_out + held_back(text, strings) == text


@pytest.mark.parametrize(
    ("text", "strings", "shown"),
    [
        ("aaab", ["aab"], "a"),
        ("aabaaab", ["aaab"], "aab"),
        ("xabcd", ["abcd", "b"], "xa"),  # the inner one is complete first
        ("xabc", ["abc", "bc", "c"], "x"),  # all are complete at once: the longest
        ("xabd", ["abc", "bd"], "xa"),  # a beginning that fails leaves a shorter one
        ("abab", ["abab", "ababab"], ""),
        ("ababa", ["babb", "aba"], ""),
        ("\ufffd", ["\ufffd"], ""),
        ("👩‍👩‍👧", ["\u200d"], "👩"),
        ("a\n\nb", ["\n\n", "\n"], "a"),
        ("ab", [], "ab"),
        ("ab", ["abc"], "ab"),
        ("aa", ["a", "a"], ""),
    ],
)
def test_strings_that_overlap_and_contain_each_other(
    text: str, strings: list[str], shown: str
) -> None:
    for cut in range(len(text) + 1):
        stop = StopStrings(strings)
        assert stop.push(text[:cut]) + stop.push(text[cut:]) + stop.finish() == shown
    stop = StopStrings(strings)
    assert "".join(map(stop.push, text)) + stop.finish() == shown


def test_nothing_is_held_back_once_it_can_be_no_string() -> None:
    stop = StopStrings(["</end>"])
    assert [stop.push(text) for text in ("a", "<", "/", "x", "<b", "</end", "/", ">")] == [
        *("a", "", "", "</x", "<b", "", "</end/", ">")
    ]
    assert stop.finish() == ""


def test_nothing_comes_behind_a_string() -> None:
    stop = StopStrings(["."])
    assert [stop.push(text) for text in ("One", " two. Three.", " Four", "")] == [
        *("One", " two", "", "")
    ]
    assert (stop.finish(), stop.stopped) == ("", True)


def test_what_is_held_back_at_the_end_comes_once() -> None:
    stop = StopStrings(["stop"])
    assert [stop.push("a sto"), stop.finish(), stop.finish()] == ["a ", "sto", ""]
    assert not stop.stopped


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(RequestError, match="a stop string is empty"):
        StopStrings(["a", ""])


class Counted(list[int]):
    """Counts how often it is asked."""

    asked = 0

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("strings", "text"),
    [
        (["a" * 50 + "b"], "a" * 50 + "c"),
        (["a" * length + "b" for length in range(1, 30)], "a"),
        (["ab" * 20 + "c", "ba" * 20 + "c"], "ab"),
        (["x" * 50], "a"),
    ],
)
def test_a_character_costs_the_same_whatever_came_before(strings: list[str], text: str) -> None:
    stop = StopStrings(strings)
    looks = stop._shorter = Counted(stop._shorter)
    for pushed, character in enumerate(text * (2000 // len(text)), start=1):
        stop.push(character)
        # A look leads to a beginning that is shorter, a character to one that is longer by one.
        assert looks.asked <= pushed
        assert len(stop._held) <= max(map(len, strings))
    assert not stop.stopped
