"""The demo that ships: a whole checkpoint like the released one, small, with its tokenizer."""

from pathlib import Path

import pytest
import sentencepiece

from export_grok.config import TENSOR_PARALLEL_SIZES, GrokConfig
from export_grok.errors import OutputError
from export_grok.export.checkpoint import open_weights
from export_grok.export.demo import DEMO_MODEL, write_demo_checkpoint

CONFIG = GrokConfig.from_file(DEMO_MODEL / "config.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "new"
    assert write_demo_checkpoint(out) == CONFIG
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_it_opens_as_a_released_checkpoint(checkpoint: Path) -> None:
    config, index = open_weights(checkpoint)
    assert config == CONFIG
    assert len(index.files) == 2 + 12 * CONFIG.num_layers
    assert contents(checkpoint) == contents(DEMO_MODEL)


def test_all_its_files_together_are_under_5_mb() -> None:
    assert sum(map(len, contents(DEMO_MODEL).values())) < 5e6


def test_it_is_grok_1_in_all_but_size() -> None:
    assert CONFIG.num_q_heads // CONFIG.num_kv_heads == 6
    assert (CONFIG.num_kv_heads, CONFIG.num_experts, CONFIG.num_selected_experts) == (8, 8, 2)
    assert (CONFIG.row_parallel_scale_groups, CONFIG.attn_logit_cap) == (8, 30)
    for size in TENSOR_PARALLEL_SIZES:
        assert CONFIG.for_rank(size).num_kv_heads == 8 // size


def test_its_tokenizer_has_the_conventions_of_the_published_one(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.model"
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert tokenizer.vocab_size() == CONFIG.vocab_size
    special = (tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.unk_id())
    assert special == (CONFIG.pad_token, CONFIG.bos_token, CONFIG.eos_token, 3)
    for text in ("In the 42nd year", "two  spaces, tab\tand\nline", "\u00e9t\u00e9 \u706f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "<0xE7>" in tokenizer.encode("\u706f", out_type=str)
    assert tokenizer.encode("42", out_type=str)[-2:] == ["<0x34>", "<0x32>"]  # digits are split


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(OutputError, match="is not empty; choose a new folder"):
        write_demo_checkpoint(tmp_path)
    with pytest.raises(OutputError, match="cannot write"):
        write_demo_checkpoint(tmp_path / "mine")
    assert contents(tmp_path) == {"mine": b"precious"}


def test_it_has_learnt_its_source() -> None:
    """A verse is far likelier to it than the same words in another order."""
    import torch

    from export_grok.export.kv_cache import KVCache
    from export_grok.export.load import model_from_index

    config, index = open_weights(DEMO_MODEL)
    model = model_from_index(config, index, "float32")
    tokenizer = sentencepiece.SentencePieceProcessor(
        model_file=str(DEMO_MODEL / "tokenizer.model")
    )
    verse = "And the LORD said unto Moses, Go unto the people, and sanctify them to day."
    words = verse.split()

    def surprise(text: str) -> float:
        ids = torch.tensor([tokenizer.encode(text)])
        cache = KVCache.allocate(config, batch=1, length=ids.shape[1], dtype="float32")
        with torch.no_grad():
            logits = model(ids, torch.zeros(1, dtype=torch.int64), cache)
        return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()

    in_order, mixed = surprise(verse), surprise(" ".join(words[::2] + words[1::2]))
    assert in_order < 3
    assert mixed > in_order + 1
