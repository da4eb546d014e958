"""A stream of tokens: the text of all of them, and never half a character."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_grok.errors import RequestError
from export_grok.runtime.text.stream_decoder import StreamDecoder
from export_grok.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.tokenizers import (
    byte_ids,
    fewer,
    many,
    some_ids,
    streamed,
    texts,
)


@many
@given(data=st.data())
def test_a_stream_says_what_decoding_all_says(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(some_ids(tokenizer))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@many
@given(text=texts)
def test_a_stream_of_text_never_ends_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\u2581", " ").replace("\ufffd", "?")
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""  # no character waits after its last byte


@many
@given(text=texts, data=st.data())
def test_a_stream_continues_from_a_prompt(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    prompt = data.draw(st.sampled_from([[], [tokenizer.bos_id]])) + tokenizer.encode(text)
    ids = data.draw(some_ids(tokenizer))
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *ids])
    assert whole.startswith(before)
    assert "".join(streamed(tokenizer, ids, prompt)) == whole[len(before) :]


@fewer
@given(data=st.data())
def test_a_stream_after_a_prompt_is_the_rest_of_the_stream_of_both(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    prompt, ids = data.draw(some_ids(tokenizer)), data.draw(some_ids(tokenizer))
    both = streamed(tokenizer, [*prompt, *ids])
    assert streamed(tokenizer, ids, prompt) == both[len(prompt) :]


@fewer
@given(data=st.data())
def test_a_stream_tells_which_tokens_a_text_is_of(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(some_ids(tokenizer))
    stream = StreamDecoder(tokenizer)
    begin, before = 0, ""
    for pushed, token in enumerate([*ids, None], start=1):
        for count, text in stream.settle(token):
            assert tokenizer.decode(ids[: begin + count]) == before + text
            if count > 1:  # only the bytes of a character are together
                assert text.encode() == bytes(
                    tokenizer.byte(part) or 0 for part in ids[begin : begin + count]
                )
            begin, before = begin + count, before + text
        assert stream.waiting == min(pushed, len(ids)) - begin
    assert begin == len(ids)


def test_a_text_of_many_bytes_streams_without_a_broken_character(tokenizer: Tokenizer) -> None:
    text = "日本語 👩‍👩‍👧 é"
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)
    # Broken off anywhere, it is all that is whole; what was held back comes once, at the end.
    for length in range(len(ids)):
        *pieces, last = streamed(tokenizer, ids[:length])
        assert text.startswith("".join(pieces))
        assert set(last) <= {"\ufffd"}
        assert "".join(pieces) + last == tokenizer.decode(ids[:length])


def test_a_character_begun_in_the_prompt_is_given_out_whole(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a€".encode())
    assert streamed(tokenizer, ids[3:], ids[:3]) == ["€", ""]


def test_bytes_wait_until_they_are_a_character(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "€😀".encode())
    assert streamed(tokenizer, ids) == ["", "", "€", "", "", "", "😀", ""]


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\x80", ["\ufffd", ""]),
        (b"\xe2\x82A", ["", "", "\ufffd\ufffdA", ""]),
        (b"\xe2\xe2\x82\xac", ["", "\ufffd", "", "€", ""]),
        (b"\xed\xa0", ["", "\ufffd\ufffd", ""]),  # a surrogate
        (b"\xe0\x80", ["", "\ufffd\ufffd", ""]),  # too long a form
        (b"\xf4\x90", ["", "\ufffd\ufffd", ""]),  # beyond U+10FFFF
        (b"\xf0\x9f\x98", ["", "", "", "\ufffd\ufffd\ufffd"]),
    ],
)
def test_bytes_that_can_become_no_character_are_given_out_at_once(
    tokenizer: Tokenizer, data: bytes, pieces: list[str]
) -> None:
    ids = byte_ids(tokenizer, data)
    assert streamed(tokenizer, ids) == pieces
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_stream_keeps_the_spaces_that_decoding_all_keeps(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("the")
    pieces = streamed(tokenizer, [tokenizer.bos_id, *word, tokenizer.eos_id, *word])
    assert "".join(pieces) == "the the"


def test_finishing_twice_gives_nothing_more(small: Tokenizer) -> None:
    stream = StreamDecoder(small, byte_ids(small, b"\xe2"))
    assert [stream.finish(), stream.finish()] == ["\ufffd", ""]


class Counting(Tokenizer):
    """A tokenizer that remembers how much it was asked to decode at once."""

    longest = 0

    def decode(self, ids: Sequence[int]) -> str:
        """Return what the tokenizer returns."""
        self.longest = max(self.longest, len(ids))
        return super().decode(ids)


@pytest.mark.parametrize("token", [1, "\u2581", "a", 0x80, 0xE2])
def test_a_push_decodes_a_bounded_window(small_file: Path, token: int | str) -> None:
    tokenizer = Counting(small_file)
    if isinstance(token, str):
        token = tokenizer.encode(token)[-1]
    elif token > 3:
        (token,) = byte_ids(tokenizer, bytes([token]))
    stream = StreamDecoder(tokenizer, [token] * 500)
    tokenizer.longest = 0
    for _ in range(500):
        stream.push(token)
    assert tokenizer.longest <= 5


def test_a_bad_id_is_refused_and_leaves_the_stream_as_it_was(tokenizer: Tokenizer) -> None:
    first, *rest = byte_ids(tokenizer, "€".encode())
    stream = StreamDecoder(tokenizer, [first])
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(RequestError, match=f"token id {bad} is outside the vocabulary"):
            stream.push(bad)
    assert [stream.push(token) for token in rest] == ["", "€"]
