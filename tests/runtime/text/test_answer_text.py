"""The text of an answer: all of it up to a stop string, and which of its tokens were shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_grok.errors import RequestError
from export_grok.runtime.text.answer_text import AnswerText
from export_grok.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.tokenizers import byte_ids, fewer, some_ids, streamed, texts


def stops_in(text: str) -> st.SearchStrategy[list[str]]:
    """Return lists of strings, most of them parts of `text`."""
    if not text:
        return st.lists(st.text(min_size=1, max_size=3), max_size=2)
    part = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(
        lambda at: text[at[0] : at[0] + at[1]]
    )
    return st.lists(part | part.map(lambda text: text + "x") | st.text(min_size=1), max_size=3)


def ended(text: str, strings: list[str]) -> str:
    """Return what is before the first string that is complete in `text`, all without one."""
    for end in range(1, len(text) + 1):
        if ending := [string for string in strings if text[:end].endswith(string)]:
            return text[: end - max(map(len, ending))]
    return text


@fewer
@given(data=st.data())
def test_without_a_stop_string_all_that_is_pushed_is_shown_as_it_is_known(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    prompt, ids = data.draw(some_ids(tokenizer)), data.draw(some_ids(tokenizer))
    answer = AnswerText(tokenizer, prompt)
    pieces = [*map(answer.push, ids), answer.finish()]
    assert pieces == streamed(tokenizer, ids, prompt)
    assert (answer.text, answer.stopped) == ("".join(pieces), False)
    assert (answer.whole, answer.rest) == (len(ids), "")


@fewer
@given(data=st.data())
def test_the_text_ends_before_the_first_stop_string(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    prompt, ids = data.draw(some_ids(tokenizer)), data.draw(some_ids(tokenizer))
    text = "".join(streamed(tokenizer, ids, prompt))
    stop = data.draw(stops_in(text))
    answer = AnswerText(tokenizer, prompt, stop)
    pieces = [*map(answer.push, ids), answer.finish()]
    assert "".join(pieces) == answer.text == ended(text, stop)
    assert answer.stopped == any(string in text for string in stop)


@fewer
@given(before=texts, data=st.data())
def test_the_whole_tokens_and_the_rest_are_the_text_at_any_time(
    tokenizer: Tokenizer, before: str, data: st.DataObject
) -> None:
    prompt = [*data.draw(st.sampled_from([[], [tokenizer.bos_id]])), *tokenizer.encode(before)]
    ids = data.draw(some_ids(tokenizer))
    answer = AnswerText(tokenizer, prompt, data.draw(stops_in(tokenizer.decode(ids))))
    start = tokenizer.decode(prompt)
    for pushed, token in enumerate([*ids, None], start=1):
        if token is None:
            answer.finish()
        else:
            answer.push(token)
        shown = start + answer.text
        assert tokenizer.decode([*prompt, *ids[: answer.whole]]) + answer.rest == shown
        # One more is none of which all is shown: bytes that wait give U+FFFD here.
        if answer.whole < min(pushed, len(ids)):
            more = tokenizer.decode([*prompt, *ids[: answer.whole + 1]])
            assert len(more) > len(shown) or more.endswith("\ufffd")


@fewer
@given(before=texts, text=texts, data=st.data())
def test_ids_of_what_was_shown_continue_it(
    tokenizer: Tokenizer, before: str, text: str, data: st.DataObject
) -> None:
    prompt = tokenizer.encode(before) or tokenizer.encode("x")
    ids = tokenizer.encode_more(text)
    answer = AnswerText(tokenizer, prompt, data.draw(stops_in(text)))
    for token in ids:
        answer.push(token)
    answer.finish()
    more = [*prompt, *ids[: answer.whole], *tokenizer.encode_more(answer.rest)]
    assert tokenizer.decode(more) == tokenizer.decode(prompt) + answer.text


def test_a_stop_string_inside_a_token_leaves_a_part_of_it(published: Tokenizer) -> None:
    prompt, ids = published.encode("Say"), published.encode_more(" the thing")
    answer = AnswerText(published, prompt, ["hin"])
    assert [answer.push(token) for token in ids] == [" the", " t"]
    assert (answer.stopped, answer.text, answer.whole, answer.rest) == (True, " the t", 1, " t")


def test_a_stop_string_across_tokens_and_characters_of_many_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_more("日本語 👩‍👩‍👧 é")
    answer = AnswerText(tokenizer, tokenizer.encode("x"), ["語 👩"])
    assert "".join(answer.push(token) for token in ids) + answer.finish() == "日本"
    assert answer.stopped
    said = [*tokenizer.encode("x"), *ids[: answer.whole]]  # a vocabulary may have 日本語
    assert tokenizer.decode(said) + answer.rest == "x日本"


def test_what_comes_after_a_stop_string_changes_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_more("a stop here")
    answer = AnswerText(tokenizer, tokenizer.encode("x"), ["stop", "here"])
    for token in ids:
        answer.push(token)
    after = (answer.text, answer.whole, answer.rest)
    assert answer.text == "a "
    assert [*map(answer.push, tokenizer.encode_more(" and more")), answer.finish()][-1] == ""
    assert (answer.text, answer.whole, answer.rest) == after


def test_a_stop_string_that_begins_in_the_prompt_is_none(tokenizer: Tokenizer) -> None:
    answer = AnswerText(tokenizer, tokenizer.encode("Que"), ["Question", "e"])
    ids = tokenizer.encode_more("stion")
    assert "".join(map(answer.push, ids)) + answer.finish() == "stion"
    assert not answer.stopped


def test_the_first_space_of_an_answer_is_shown_and_stops(tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("x"), tokenizer.encode_more(" the")
    assert "".join(map(AnswerText(tokenizer, prompt).push, ids)) == " the"
    answer = AnswerText(tokenizer, prompt, [" "])
    assert answer.push(ids[0]) == ""
    assert (answer.stopped, answer.text, answer.whole, answer.rest) == (True, "", 0, "")


def test_marks_are_no_text_and_no_border_for_a_stop_string(tokenizer: Tokenizer) -> None:
    marks = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    ids = [*marks, *tokenizer.encode_more("st"), *marks, *tokenizer.encode_more("op"), *marks]
    answer = AnswerText(tokenizer, tokenizer.encode("x"))
    assert "".join(map(answer.push, ids)) == "stop"
    assert (answer.whole, answer.rest) == (len(ids), "")
    answer = AnswerText(tokenizer, tokenizer.encode("x"), ["stop"])
    assert "".join(map(answer.push, ids)) == ""
    assert (answer.stopped, answer.whole) == (True, len(marks))


def test_the_id_that_ends_an_answer_is_not_in_its_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode_more("The end."), tokenizer.eos_id]
    answer = AnswerText(tokenizer, tokenizer.encode("x"))
    pieces = [answer.push(token) for token in ids]
    assert (pieces[-1], answer.finish(), answer.text) == ("", "", "The end.")
    assert answer.whole == len(ids)


def test_half_a_character_at_the_end_is_shown_once_as_broken_and_counts(
    tokenizer: Tokenizer,
) -> None:
    ids = byte_ids(tokenizer, "é€".encode()[:-1])
    answer = AnswerText(tokenizer, tokenizer.encode("x"))
    assert [answer.push(token) for token in ids] == ["", "é", "", ""]
    assert (answer.text, answer.whole, answer.rest) == ("é", 2, "")
    assert [answer.finish(), answer.finish()] == ["\ufffd\ufffd", ""]
    assert (answer.whole, answer.rest) == (4, "")


def test_a_stop_string_may_be_completed_by_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"a\xe2")
    answer = AnswerText(tokenizer, tokenizer.encode("x"), ["\ufffd"])
    assert [*map(answer.push, ids), answer.finish()] == ["a", "", ""]
    assert (answer.stopped, answer.text, answer.whole) == (True, "a", 1)


def test_half_a_character_of_the_prompt_is_no_token_of_the_answer(tokenizer: Tokenizer) -> None:
    first, *rest = byte_ids(tokenizer, "€".encode())
    answer = AnswerText(tokenizer, [first])
    assert [answer.push(token) for token in rest] == ["", "€"]
    assert (answer.whole, answer.rest) == (2, "")
    answer = AnswerText(tokenizer, [first], ["A"])
    assert answer.push(byte_ids(tokenizer, b"A")[0]) == "\ufffd"
    assert (answer.stopped, answer.whole, answer.rest) == (True, 0, "")
    *prompt, _ = byte_ids(tokenizer, "€".encode())
    answer = AnswerText(tokenizer, prompt, ["\ufffdA"])
    assert answer.push(byte_ids(tokenizer, b"A")[0]) == "\ufffd"
    assert (answer.stopped, answer.whole, answer.rest) == (True, 0, "")


def test_a_bad_id_is_refused_and_leaves_the_text_as_it_was(small: Tokenizer) -> None:
    first, *rest = byte_ids(small, "€".encode())
    answer = AnswerText(small, small.encode("x"))
    answer.push(first)
    with pytest.raises(RequestError, match="token id 400 is outside the vocabulary"):
        answer.push(400)
    assert [answer.push(token) for token in rest] == ["", "€"]
    assert (answer.whole, answer.rest) == (3, "")


def test_what_is_kept_to_be_looked_at_does_not_grow(small: Tokenizer) -> None:
    answer = AnswerText(small, small.encode("x"), ["a" * 20 + "b"])
    (token,) = small.encode_more("a")
    sizes = set()
    for pushed in range(1, 301):
        answer.push(token)
        sizes.add(len(answer._ahead))
        assert answer.whole == max(0, pushed - 20)
    assert max(sizes) == 20
