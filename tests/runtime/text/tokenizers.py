"""Two tokenizers for tests, a small one of our own and the published one, and texts for them."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from export_grok.runtime.text.stream_decoder import StreamDecoder
from export_grok.runtime.text.tokenizer import Tokenizer

__all__ = [
    "DEMO",
    "GOLDEN",
    "TEXTS",
    "byte_ids",
    "fewer",
    "many",
    "published",
    "small",
    "small_file",
    "small_model",
    "some_ids",
    "streamed",
    "texts",
    "tokenizer",
]

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data"
DEMO = ROOT / "export" / "demo_model" / "tokenizer.model"
PUBLISHED = ROOT.parent / "shared" / "fixtures" / "tokenizer.model"

GOLDEN: dict[str, Any] = json.loads((DATA / "tokenizer_golden.json").read_text(encoding="utf-8"))

# Tokenizers are read only, so hypothesis may share one among its examples.
many = settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
fewer = settings(many, max_examples=100)

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


def small_model(*user_defined: str) -> bytes:
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
        user_defined_symbols=["\n", "\n\n", "  ", "<|separator|>", *user_defined],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(small_model())
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
    """Return the pieces of a stream, the one of its end last."""
    stream = StreamDecoder(tokenizer, prompt)
    return [*(stream.push(token) for token in ids), stream.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the tokens that are these bytes, one each."""
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
