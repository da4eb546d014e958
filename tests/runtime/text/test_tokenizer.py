"""Laws of the tokenizer and its stream, on a small model of our own and on the published file."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from export_grok.errors import BundleError, RequestError
from export_grok.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.tokenizers import (
    DEMO,
    GOLDEN,
    TEXTS,
    many,
    small_model,
    streamed,
    texts,
)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: ascii(case["text"][:20]))
def test_published_texts_have_the_published_ids(
    published: Tokenizer, case: dict[str, Any]
) -> None:
    assert published.encode(case["text"]) == case["ids"]
    assert published.decode(case["ids"]) == case["decoded"]
    assert "".join(streamed(published, case["ids"])) == case["decoded"]


@pytest.mark.parametrize("case", GOLDEN["decode_cases"], ids=lambda case: str(case["ids"]))
def test_published_ids_have_the_published_text(published: Tokenizer, case: dict[str, Any]) -> None:
    assert published.decode(case["ids"]) == case["text"]
    assert "".join(streamed(published, case["ids"])) == case["text"]


def test_the_published_file_has_its_special_ids(published: Tokenizer) -> None:
    meta = GOLDEN["meta"]
    for name in ("vocab_size", "pad_id", "bos_id", "eos_id", "unk_id"):
        assert getattr(published, name) == meta[name], name
    controls = [t for t in range(published.vocab_size) if published.is_control(t)]
    assert controls == meta["control_ids"]
    first = meta["byte_ids"]["id_of_0x00"]
    assert [published.byte(t) for t in range(first, first + 256)] == list(range(256))
    assert published.byte(first - 1) is None
    assert published.byte(first + 256) is None


def test_the_small_model_has_the_special_ids_it_was_made_with(small: Tokenizer) -> None:
    ids = (small.vocab_size, small.pad_id, small.bos_id, small.eos_id, small.unk_id)
    assert ids == (400, 0, 1, 2, 3)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@many
@given(text=texts)
def test_any_text_survives_the_round_trip(small: Tokenizer, text: str) -> None:
    # U+2581 is how sentencepiece writes a space
    assert small.decode(small.encode(text)) == text.replace("\u2581", " ")


def test_encoding_adds_no_mark_of_beginning_or_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("[BOS] hello <s>")
    assert not any(tokenizer.is_control(token) for token in ids)
    assert tokenizer.encode("") == []


def test_control_ids_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    marks = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert tokenizer.decode([marks[0], *ids, *marks[1:]]) == "hello"


@pytest.mark.parametrize("text", ["a", " a", "  a", "\na", ""])
def test_leading_spaces_are_neither_lost_nor_added(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for marks in ([], [tokenizer.bos_id], [tokenizer.pad_id, tokenizer.bos_id]):
        assert tokenizer.decode([*marks, *ids]) == text
        assert "".join(streamed(tokenizer, [*marks, *ids])) == text
    # In the middle of a text too, behind a mark or none.
    begun = tokenizer.encode("x")
    more = tokenizer.encode_more(text)
    for marks in ([], [tokenizer.bos_id], [tokenizer.bos_id] * 5):
        assert tokenizer.decode([*begun, *marks, *more]) == "x" + text
        assert "".join(streamed(tokenizer, more, [*begun, *marks])) == text
        assert "".join(streamed(tokenizer, [*marks, *more], begun)) == text


def test_a_beginning_mark_is_there_once_if_the_caller_puts_one(tokenizer: Tokenizer) -> None:
    for text in ("", "hello", " hello", "<s>", "[BOS] hello", "<s></s>[EOS]"):
        assert tokenizer.bos_id not in tokenizer.encode(text)
        assert tokenizer.bos_id not in tokenizer.encode_more(text)
        assert [tokenizer.bos_id, *tokenizer.encode(text)].count(tokenizer.bos_id) == 1


@pytest.mark.parametrize("name", ["small", "published", "demo"])
@many
@given(before=texts, text=texts)
def test_a_text_that_continues_another_is_kept_as_it_is(
    request: pytest.FixtureRequest, name: str, before: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    first = tokenizer.encode(before) or tokenizer.encode("x")
    ids = tokenizer.encode_more(text)
    assert tokenizer.decode([*first, *ids]) == tokenizer.decode(first) + text.replace(
        "\u2581", " "
    )


@pytest.mark.parametrize("name", ["small", "published", "demo"])
@many
@given(text=texts.filter(bool))
def test_a_text_after_a_space_has_the_ids_that_it_has_at_the_beginning(
    request: pytest.FixtureRequest, name: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    assert tokenizer.encode_more(" " + text) == tokenizer.encode(text)


@pytest.mark.parametrize("before", ["x", " ", "\n", "3", "<|separator|>", "曲", "\U0010ff00"])
@pytest.mark.parametrize("text", [*TEXTS, "\n\n", "12", "\U0010ff00", "<|separator|>a"])
def test_nothing_comes_between_two_texts(tokenizer: Tokenizer, before: str, text: str) -> None:
    ids = [*tokenizer.encode(before), *tokenizer.encode_more(text)]
    assert tokenizer.decode(ids) == before + text


def test_nothing_more_has_no_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_more("") == []


def test_pieces_of_private_characters_do_not_join_a_text_that_continues(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(small_model("\U0010ff00", "\U0010ff00a", "\U0010ff01 "))
    tokenizer = Tokenizer(tmp_path / "m")
    for text in ("a", " ", "ab", "\U0010ff00ab", "\U0010ff01 b", "\U0010ff02"):
        ids = [*tokenizer.encode("x"), *tokenizer.encode_more(text)]
        assert tokenizer.decode(ids) == "x" + text


def test_a_file_with_every_private_character_is_refused(small_file: Path, tmp_path: Path) -> None:
    every = "".join(map(chr, range(0x10FF00, 0x10FFFE))).encode()
    # A field that the format does not know is passed over.
    field = bytes([15 << 3 | 2, len(every) & 0x7F | 0x80, len(every) >> 7])
    (tmp_path / "m").write_bytes(small_file.read_bytes() + field + every)
    with pytest.raises(BundleError, match="holds every character from"):
        Tokenizer(tmp_path / "m")


def test_ids_outside_the_vocabulary_are_named_with_its_size(small: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        small.decode([5, -7, 400, 6])
    assert "token id -7, 400 is outside the vocabulary of 400" in str(caught.value)
    with pytest.raises(RequestError, match="and 95 more is outside"):
        small.decode([1000] * 100)


def test_half_a_surrogate_pair_is_refused(small: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D83D at character 2"):
        small.encode("ab\ud83d")
    with pytest.raises(RequestError, match=r"U\+D83D at character 2"):
        small.encode_more("ab\ud83d")


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\x00" * 100, b"version https://git-lfs\n"])
def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(BundleError) as caught:
        Tokenizer(path)
    text = str(caught.value)
    assert text.startswith(f"{path} ({len(content)} bytes) is no sentencepiece model")
    assert "\n" not in text


def test_a_cut_model_is_refused(small_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.model"
    path.write_bytes(small_file.read_bytes()[:-100])
    with pytest.raises(BundleError, match="damaged"):
        Tokenizer(path)


def test_a_piece_that_is_no_text_is_refused_where_it_is_met(
    small_file: Path, tmp_path: Path
) -> None:
    model = small_file.read_bytes()
    space = "\N{LOWER ONE EIGHTH BLOCK}".encode()
    (tmp_path / "m").write_bytes(model.replace(space, space[:2] + b"\xff"))
    tokenizer = Tokenizer(tmp_path / "m")
    damaged = 0
    for token in range(tokenizer.vocab_size):
        try:
            tokenizer.byte_length(token)
        except BundleError as error:
            damaged += 1
            assert str(error).startswith(f"{tmp_path / 'm'} has a piece that is no UTF-8")
    assert damaged > 0


def test_a_missing_model_is_refused_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.model", tmp_path):
        with pytest.raises(BundleError) as caught:
            Tokenizer(path)
        assert str(caught.value).startswith(f"{path} cannot be read (")
        assert "\n" not in str(caught.value)
