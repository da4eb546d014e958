"""Laws of the tokenizer and its stream, on a small model of our own and on the published file."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_grok.errors import BundleError, RequestError
from export_grok.runtime.tokenizer import StreamDecoder, Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT.parent / "shared" / "fixtures" / "tokenizer.model"

GOLDEN: dict[str, Any] = json.loads((DATA / "tokenizer_golden.json").read_text(encoding="utf-8"))

# The tokenizers are read only, so hypothesis may share one among its examples.
many = settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

TEXTS = [
    "",
    " ",
    "   ",
    "The answer is 42.",
    " leading and  double   spaces ",
    "line\n\n\tand tab\r\n",
    "naïve café, Ελλάδα, Москва, 曲",
    "👨‍👩‍👧‍👦 and 🏳️‍🌈, 👍🏽",
    "e\u0301 combining, \u200d lone joiner",
    "\ufffd is a character, too",
    "a\x00b",
    "[PAD] <s> <|separator|>",
]
texts = st.one_of(
    st.text(),
    st.lists(st.sampled_from([*TEXTS, "👩", "\u200d", "💻", " ", "a"]), max_size=8).map("".join),
)


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with 400 pieces that has every property of the published one."""
    model = io.BytesIO()
    words = "the quick brown fox jumps over a lazy dog and on the other side there is nothing"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([words, words[::-1], words.title(), "12 34 " + words[20:]]),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        hard_vocab_limit=True,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n", "\n\n", "  ", "<|separator|>"],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session")
def small(small_file: Path) -> Tokenizer:
    return Tokenizer(small_file)


@pytest.fixture(scope="session")
def published() -> Tokenizer:
    if not PUBLISHED.is_file():
        pytest.skip("the published tokenizer.model is not part of this repository, nor beside it")
    digest = hashlib.sha256(PUBLISHED.read_bytes()).hexdigest()
    assert digest == GOLDEN["meta"]["model_sha256"]
    return Tokenizer(PUBLISHED)


@pytest.fixture(params=["small", "published"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen = request.getfixturevalue(request.param)
    assert isinstance(chosen, Tokenizer)
    return chosen


def streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    stream = StreamDecoder(tokenizer, prompt)
    return [*(stream.push(token) for token in ids), stream.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    ids = {tokenizer.byte(token): token for token in range(tokenizer.vocab_size)}
    return [ids[value] for value in data]


def some_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Return lists rich in control ids, spaces and bytes, whole characters and parts of them."""
    spaces = tokenizer.encode(" ") + tokenizer.encode("  a")
    token = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1),
        st.integers(0, 3),
        st.sampled_from(spaces),
    )
    start = next(t for t in range(tokenizer.vocab_size) if tokenizer.byte(t) == 0)
    some_bytes = st.one_of(
        st.binary(max_size=5),
        st.text(max_size=3).map(str.encode),
        st.text(min_size=1, max_size=1).map(lambda text: text.encode()[:-1]),
    ).map(lambda data: [start + value for value in data])
    parts = st.lists(st.one_of(token.map(lambda t: [t]), some_bytes), max_size=12)
    return parts.map(lambda lists: [token for part in lists for token in part])


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
    streamed(tokenizer, [token] * 500, prompt=[token] * 500)
    assert tokenizer.longest <= 5


def test_a_bad_id_is_refused_and_leaves_the_stream_as_it_was(tokenizer: Tokenizer) -> None:
    first, *rest = byte_ids(tokenizer, "€".encode())
    stream = StreamDecoder(tokenizer, [first])
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(RequestError, match=f"token id {bad} is outside the vocabulary"):
            stream.push(bad)
    assert [stream.push(token) for token in rest] == ["", "€"]


def test_ids_outside_the_vocabulary_are_named_with_its_size(small: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:
        small.decode([5, -7, 400, 6])
    assert "token id -7, 400 is outside the vocabulary of 400" in str(caught.value)
    with pytest.raises(RequestError, match="and 95 more is outside"):
        small.decode([1000] * 100)


def test_half_a_surrogate_pair_is_refused(small: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D83D at character 2"):
        small.encode("ab\ud83d")


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
