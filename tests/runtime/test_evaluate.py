"""Perplexity of a text, by an engine and by the model it was made from."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from export_grok.artifacts import Bundle
from export_grok.errors import BundleError, RequestError
from export_grok.export.kv_cache import KVCache
from export_grok.export.load import model_from_index
from export_grok.runtime.evaluate import Evaluation, evaluate_bundle
from export_grok.runtime.params import EvaluationOptions
from export_grok.runtime.text.tokenizer import tokenizer_of
from tests.bundles import BundleOf

WINDOW = 16
TEXT = "In the beginning was the word: 1984 times, and 日本語 too.\n" * 9


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def evaluated(
    bundle: Bundle, text: Path, *, reference: bool = False, batch: int = 3, lines: bool = False
) -> Evaluation:
    options = EvaluationOptions(window=WINDOW, batch=batch, lines=lines)
    return evaluate_bundle(bundle.folder, text, options, reference=reference)


def test_perplexity_is_that_of_the_model_by_its_definition(demo: Bundle, text: Path) -> None:
    tokenizer = tokenizer_of(demo)
    ids = torch.tensor(tokenizer.encode(TEXT))
    rows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    model = model_from_index(demo.config, demo.index(), "float32")
    cache = KVCache.allocate(demo.config, batch=len(rows), length=WINDOW, dtype="float32")
    with torch.no_grad():
        logits = model(rows, torch.zeros(len(rows), dtype=torch.int64), cache)[:, :-1].double()
    log_probabilities = logits.log_softmax(-1)
    nats = -log_probabilities.gather(-1, rows[:, 1:, None]).sum().item()
    guessed = rows[:, 1:].flatten().tolist()
    found = evaluated(demo, text, reference=True)
    assert found.windows == len(rows)
    assert found.engine.tokens == len(guessed)
    assert found.reference is not None
    assert found.reference.perplexity == pytest.approx(math.exp(nats / len(guessed)), rel=1e-6)
    assert found.engine.perplexity == pytest.approx(found.reference.perplexity, rel=1e-3)
    assert found.difference is not None
    assert abs(found.difference) < 1e-3
    bits = found.engine.nats / math.log(2) / found.engine.bytes
    assert found.engine.bits_per_byte == pytest.approx(bits)


def test_the_bytes_of_all_tokens_are_those_of_the_text(demo: Bundle) -> None:
    tokenizer = tokenizer_of(demo)
    ids = tokenizer.encode(TEXT)
    # The tokenizer puts one space before a text.
    assert sum(map(tokenizer.byte_length, ids)) == len(TEXT.encode()) + 1
    assert tokenizer.byte_length(tokenizer.eos_id) == 0


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_the_batch_does_not_matter(demo: Bundle, text: Path, batch: int) -> None:
    one, other = evaluated(demo, text), evaluated(demo, text, batch=batch)
    assert other.engine.nats == pytest.approx(one.engine.nats, rel=1e-6)
    assert (other.windows, other.engine.bytes) == (one.windows, one.engine.bytes)


def test_lines_are_texts_with_an_end_each(demo: Bundle, text: Path) -> None:
    tokenizer = tokenizer_of(demo)
    ids = [t for line in TEXT.splitlines() for t in [*tokenizer.encode(line), tokenizer.eos_id]]
    found = evaluated(demo, text, lines=True)
    assert found.windows == len(ids) // WINDOW
    rows = np.array(ids[: found.windows * WINDOW]).reshape(-1, WINDOW)
    assert found.engine.bytes == sum(map(tokenizer.byte_length, rows[:, 1:].flatten().tolist()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"short", r"has \d+ tokens, a window 16"),
        (b"\xff\xfe", "cannot be read as UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(
    demo: Bundle, tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=message):
        evaluated(demo, path)


@pytest.mark.parametrize(("window", "batch"), [(1, 8), (0, 8), (16, 0)])
def test_impossible_cuts_are_refused(window: int, batch: int) -> None:
    with pytest.raises(RequestError, match=f"window is {window}, batch {batch}"):
        EvaluationOptions(window=window, batch=batch)


def test_a_window_beyond_the_model_is_refused(demo: Bundle, text: Path) -> None:
    length = demo.config.sequence_len + 1
    with pytest.raises(RequestError, match=f"window is {length}"):
        evaluate_bundle(demo.folder, text, EvaluationOptions(window=length))


def test_a_bundle_without_its_tokenizer_is_refused(bundle_of: BundleOf, text: Path) -> None:
    with pytest.raises(BundleError, match=r"has no tokenizer\.model"):
        evaluated(bundle_of("tiny"), text)
