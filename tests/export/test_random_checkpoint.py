"""A random checkpoint is one like the released, the same for the same seed, and sane in size."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.errors import OutputError
from export_grok.export import random_checkpoint
from export_grok.export.checkpoint import open_weights
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.weights import Weight, WeightReader

CONFIG = GrokConfig(
    num_layers=4,
    emb_size=192,
    num_q_heads=48,
    num_kv_heads=8,
    key_size=8,
    ffn_size=128,
    vocab_size=512,
    attn_output_multiplier=8**-0.5,
    embedding_multiplier_scale=192**0.5,
    output_multiplier_scale=3**-0.5,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("random") / "new"
    write_random_checkpoint(CONFIG, out)
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


def test_the_same_seed_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    write_random_checkpoint(CONFIG, tmp_path / "again")
    write_random_checkpoint(CONFIG, tmp_path / "other", seed=1)
    first, other = contents(checkpoint), contents(tmp_path / "other")
    assert contents(tmp_path / "again") == first
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
    assert embedding.std() == pytest.approx(CONFIG.emb_size**-0.5, rel=0.05)


def test_int8_weights_take_every_value(checkpoint: Path) -> None:
    _, index = open_weights(checkpoint)
    array = WeightReader(checkpoint).read(index["layers.3.experts.up.weight"])
    assert (array.min(), array.max()) == (-128, 127)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(OutputError, match="is not empty; choose a new folder"):
        write_random_checkpoint(CONFIG, tmp_path)
    with pytest.raises(OutputError, match="cannot write"):
        write_random_checkpoint(CONFIG, tmp_path / "mine")
    assert contents(tmp_path) == {"mine": b"precious"}


def test_any_config_is_written_in_small_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_checkpoint, "BLOCK_ITEMS", 1000)
    config = dataclasses.replace(CONFIG, num_layers=11, emb_size=33, ffn_size=24, vocab_size=100)
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
