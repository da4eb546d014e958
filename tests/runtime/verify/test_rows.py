"""What is read: rows of different length, from a text that has enough, the same in every run."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_grok.artifacts import Bundle
from export_grok.errors import BundleError, RequestError
from export_grok.export.demo import DEMO_MODEL
from export_grok.runtime.text.tokenizer import Tokenizer
from export_grok.runtime.verify.rows import TEXT, rows_of
from tests.conftest import load_golden
from tests.runtime.verify.bundles import bundle_with

TOKENIZER = DEMO_MODEL / "tokenizer.model"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return one whose model knows as many tokens as its tokenizer."""
    vocabulary = Tokenizer(TOKENIZER).vocab_size
    config = dataclasses.replace(load_golden("tiny").config, vocab_size=vocabulary)
    folder = tmp_path_factory.mktemp("rows") / "bundle"
    return bundle_with("tiny", folder, TOKENIZER, config=config)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return one without a tokenizer."""
    return bundle_with("tiny", tmp_path_factory.mktemp("rows") / "bundle")


prompts = st.integers(3, 200)
decoded = st.integers(0, 50)


@given(prompt=prompts, tokens=decoded, batch=st.integers(1, 5))
def test_rows_are_of_different_length_and_all_have_what_is_decoded_and_more(
    plain: Bundle, prompt: int, tokens: int, batch: int
) -> None:
    rows = rows_of(plain, prompt=prompt, tokens=tokens, batch=batch).rows
    lengths = [len(row) for row in rows]
    assert lengths[0] == prompt + tokens
    assert len(rows) == min(batch, 3)
    assert min(lengths) > tokens
    assert lengths == sorted(set(lengths), reverse=True)


@given(prompt=prompts, tokens=decoded)
def test_without_a_tokenizer_tokens_are_those_of_the_vocabulary_and_no_marks(
    plain: Bundle, prompt: int, tokens: int
) -> None:
    found = rows_of(plain, prompt=prompt, tokens=tokens, batch=3)
    ids = {token for row in found.rows for token in row}
    config = plain.config
    assert min(ids) > max(config.pad_token, config.bos_token, config.eos_token)
    assert max(ids) < config.vocab_size
    assert "random" in found.source
    assert found == rows_of(plain, prompt=prompt, tokens=tokens, batch=3)


def test_rows_follow_each_other_in_the_text(bundle: Bundle, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One two three, four five six. Æther — 日本語! " * 20, encoding="utf-8")
    ids = Tokenizer(TOKENIZER).encode(text.read_text(encoding="utf-8"))
    found = rows_of(bundle, prompt=20, tokens=4, batch=3, text=text)
    assert [len(row) for row in found.rows] == [24, 18, 7]
    assert [token for row in found.rows for token in row] == ids[: 24 + 18 + 7]
    assert found.source == str(text)


@given(prompt=st.integers(3, 3000))
def test_the_verses_are_read_however_many_tokens_are_asked_for(
    bundle: Bundle, prompt: int
) -> None:
    found = rows_of(bundle, prompt=prompt, tokens=2, batch=3)
    ids = Tokenizer(TOKENIZER).encode(TEXT)
    flat = [token for row in found.rows for token in row]
    assert flat == [ids[number % len(ids)] for number in range(len(flat))]
    assert "Ecclesiastes" in found.source


# ---- refused


def written(folder: Path, content: bytes | None) -> Path:
    path = folder / "text.txt"
    if content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, r"text.txt cannot be read as UTF-8 text: .*No such file"),
        (b"caf\xe9 au lait", r"text.txt cannot be read as UTF-8 text: .*can't decode byte 0xe9"),
        (b"", r"text.txt has 0 tokens; rows of 24, 18, 7 need 49: give a longer text, a smaller"),
        (b"too short", r"text.txt has \d+ tokens; rows of 24, 18, 7 need 49.*or fewer --tokens"),
    ],
)
def test_a_text_that_cannot_be_taken_is_told_with_what_is_needed(
    bundle: Bundle, tmp_path: Path, content: bytes | None, told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        rows_of(bundle, prompt=20, tokens=4, batch=3, text=written(tmp_path, content))


def test_a_folder_is_no_text(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read as UTF-8 text"):
        rows_of(bundle, prompt=20, tokens=4, batch=3, text=tmp_path)


def test_a_text_without_a_tokenizer_is_told(plain: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no tokenizer\.model"):
        rows_of(plain, prompt=20, tokens=4, batch=3, text=written(tmp_path, b"A text. " * 99))


def test_a_tokenizer_of_another_model_is_told_before_its_tokens_are_fed(tmp_path: Path) -> None:
    pieces = Tokenizer(TOKENIZER).vocab_size
    config = dataclasses.replace(load_golden("tiny").config, vocab_size=pieces - 1)
    bundle = bundle_with("tiny", tmp_path / "bundle", TOKENIZER, config=config)
    with pytest.raises(BundleError, match=rf"has {pieces} pieces, the model knows {pieces - 1}"):
        rows_of(bundle, prompt=20, tokens=4, batch=3)
