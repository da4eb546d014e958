"""The demo is a checkpoint like the released one, the same for the same seed, and sane in size."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from numpy.typing import NDArray

from export_grok.config import TENSOR_PARALLEL_SIZES
from export_grok.errors import OutputError
from export_grok.export import demo
from export_grok.export.checkpoint import open_weights
from export_grok.export.demo import DEMO, write_demo_checkpoint, write_random_checkpoint
from export_grok.weights import Weight, WeightReader


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "new"
    assert write_demo_checkpoint(out) == DEMO
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_it_opens_as_a_released_checkpoint(checkpoint: Path) -> None:
    config, index = open_weights(checkpoint)
    assert config == DEMO
    assert len(index.files) == 2 + 12 * DEMO.num_layers
    assert sum(map(len, contents(checkpoint).values())) < 5e6


def test_it_is_grok_1_in_all_but_size() -> None:
    assert DEMO.num_q_heads // DEMO.num_kv_heads == 6
    assert (DEMO.num_kv_heads, DEMO.num_experts, DEMO.row_parallel_scale_groups) == (8, 8, 8)
    assert DEMO.ffn_size % 64 == 0
    for size in TENSOR_PARALLEL_SIZES:
        assert DEMO.for_rank(size).num_kv_heads == 8 // size


def test_the_same_seed_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    write_demo_checkpoint(tmp_path / "again")
    write_demo_checkpoint(tmp_path / "other", seed=1)
    first, other = contents(checkpoint), contents(tmp_path / "other")
    assert contents(tmp_path / "again") == first
    assert first["tokenizer.model"] == other["tokenizer.model"]
    for name in first:
        assert (first[name] == other[name]) == ("tensor" not in name)


def dequantised(reader: WeightReader, weight: Weight, scales: Weight) -> NDArray[np.float32]:
    *lead, rows, columns = weight.shape
    groups = scales.shape[-2]
    cut = reader.read(weight).astype(np.float32).reshape(*lead, groups, rows // groups, columns)
    return cut * reader.read(scales).astype(np.float32)[..., :, None, :]


def test_weights_keep_the_length_of_what_they_multiply(checkpoint: Path) -> None:
    _, index = open_weights(checkpoint)
    reader = WeightReader(checkpoint)
    for name, weight in index.weights.items():
        if name.endswith(".weight") and weight.dtype == "int8":
            array = dequantised(reader, weight, index[name.removesuffix("weight") + "scales"])
            assert array.std() == pytest.approx(weight.shape[-2] ** -0.5, rel=0.1)
        elif name.endswith("norm.scale"):
            assert reader.read(weight).mean() == pytest.approx(1, rel=0.1)
    embedding = reader.read(index["embedding.weight"])
    assert embedding.std() == pytest.approx(DEMO.emb_size**-0.5, rel=0.05)


def test_int8_weights_take_every_value(checkpoint: Path) -> None:
    _, index = open_weights(checkpoint)
    array = WeightReader(checkpoint).read(index["layers.3.experts.up.weight"])
    assert (array.min(), array.max()) == (-128, 127)


def test_the_tokenizer_is_one_of_the_config(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = checkpoint / "tokenizer.model"
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert tokenizer.vocab_size() == DEMO.vocab_size
    special = (tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.unk_id())
    assert special == (DEMO.pad_token, DEMO.bos_token, DEMO.eos_token, 3)
    for text in ("The lamp turned 42 times.", "two  spaces, tab\tand\nline", "été 灯"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "<0xE7>" in tokenizer.encode("灯", out_type=str)
    write_demo_checkpoint(tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(OutputError, match="is not empty; choose a new folder"):
        write_demo_checkpoint(tmp_path)
    with pytest.raises(OutputError, match="cannot write"):
        write_demo_checkpoint(tmp_path / "mine")
    assert contents(tmp_path) == {"mine": b"precious"}


def test_any_config_is_written_in_small_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "BLOCK_ITEMS", 1000)
    config = dataclasses.replace(DEMO, num_layers=11, emb_size=33, ffn_size=24, vocab_size=100)
    done: list[int] = []
    write_random_checkpoint(config, tmp_path, seed=7, progress=done.append)
    found, index = open_weights(tmp_path)
    assert found == config
    assert sum(done) == sum(weight.nbytes for weight in index)
    assert max(done) <= 4000


def test_every_layer_has_weights_of_its_own(checkpoint: Path) -> None:
    _, index = open_weights(checkpoint)
    reader = WeightReader(checkpoint)
    layers = [reader.read(index[f"layers.{i}.pre_attn_norm.scale"]).tobytes() for i in range(4)]
    assert len(set(layers)) == 4
