"""A folder of weights becomes the right index, or one error that names all that is wrong."""

import dataclasses
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_grok.config import GROK_1, GrokConfig
from export_grok.errors import CheckpointError, ConfigError, UnsafePickleError
from export_grok.export.checkpoint import open_weights, released_files
from export_grok.export.index_source import IndexSource
from export_grok.export.parameters import Parameter, model_parameters
from export_grok.export.released_layout import write_released
from export_grok.export.store.folder import write_store
from export_grok.weights import WeightIndex, WeightReader

DATA = Path(__file__).resolve().parents[1] / "data"
NAMES = ("tiny", "tiny8", "deep13")

# What the original program calls a parameter, and what we do.
OURS = {
    "moe/linear": "experts.gate",
    "moe/linear_1": "experts.down",
    "moe/linear_v": "experts.up",
    "multi_head_attention/key": "attention.key",
    "multi_head_attention/linear": "attention.out",
    "multi_head_attention/query": "attention.query",
    "multi_head_attention/value": "attention.value",
    "rms_norm": "pre_attn_norm.scale",
    "rms_norm_1": "post_attn_norm.scale",
    "rms_norm_2": "pre_moe_norm.scale",
    "rms_norm_3": "post_moe_norm.scale",
    "router": "router.weight",
}


def our_name(module: str) -> str:
    if module == "language_model/in_out_embed":
        return "embedding.weight"
    if module == "language_model/rms_norm":
        return "final_norm.scale"
    _, layer, inner = module.split("/", 2)
    return f"layers.{layer.removeprefix('decoder_layer_')}.{OURS[inner]}"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return a copy of a checkpoint of 2 layers that may be damaged."""
    return shutil.copytree(DATA / "tiny", tmp_path / "tiny")


def faults_of(path: Path, config: GrokConfig | None = None) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_weights(path, config)
    return caught.value.faults


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_the_one_that_the_original_program_loads(name: str) -> None:
    config, index = open_weights(DATA / name)
    assert config == GrokConfig.from_file(DATA / name / "config.json")
    assert index.root == DATA / name
    assert index.weights.keys() == model_parameters(config).keys()
    assert index.files == {
        f"ckpt-0/{path.name}": path.stat().st_size for path in (DATA / name / "ckpt-0").iterdir()
    }
    for entry in json.loads((DATA / name / "ckpt_index.json").read_text()):
        ours = our_name(entry["module"])
        main = ours if entry["scales_shape"] is None else f"{ours}.weight"
        assert index[main].file == f"ckpt-0/{entry['file']}"
        assert list(index[main].shape) == entry["shape"]
        assert index[main].dtype == entry["dtype"]
        if entry["scales_shape"] is not None:
            assert index[f"{ours}.scales"].file == f"ckpt-0/{entry['file']}"
            assert list(index[f"{ours}.scales"].shape) == entry["scales_shape"]
            assert index[main].groups == entry["scales_shape"][-2]


def test_files_follow_the_layers_as_texts() -> None:
    _, index = open_weights(DATA / "deep13")
    router = {layer: index[f"layers.{layer}.router.weight"].file for layer in range(13)}
    assert sorted(router, key=lambda layer: router[layer]) == [0, 1, 10, 11, 12, *range(2, 10)]
    full = list(released_files(GROK_1).values())
    assert len(full) == 770
    assert full[26]["weight"].name == "layers.10.experts.gate.weight"
    assert full[146]["weight"].name == "layers.2.experts.gate.weight"
    assert full[769]["array"].name == "layers.9.router.weight"


def test_the_index_is_that_of_model_parameters_in_order_with_groups() -> None:
    config, index = open_weights(DATA / "tiny8")
    for name, parameter in model_parameters(config).items():
        weight = index[name]
        assert (weight.name, weight.shape, weight.dtype, weight.groups) == (
            name,
            parameter.shape,
            parameter.dtype,
            parameter.groups,
        )
    assert list(index.weights) == list(model_parameters(config))


def test_the_folder_of_the_files_itself_is_a_checkpoint() -> None:
    config, whole = open_weights(DATA / "tiny")
    inner_config, inner = open_weights(DATA / "tiny" / "ckpt-0")
    assert inner_config == config
    assert inner["final_norm.scale"].file == "tensor00001_000"
    array = WeightReader(inner.root).read(inner["layers.1.router.weight"])
    same = WeightReader(whole.root).read(whole["layers.1.router.weight"])
    assert array.tobytes() == same.tobytes()


def test_links_to_files_elsewhere_are_read(tmp_path: Path, tiny: Path) -> None:
    blobs = tiny.rename(tmp_path / "blobs")
    linked = tmp_path / "snapshot" / "ckpt-0"
    linked.mkdir(parents=True)
    for path in (blobs / "ckpt-0").iterdir():
        (linked / path.name).symlink_to(os.path.relpath(path, linked))
    config = GrokConfig.from_file(blobs / "config.json")
    _, index = open_weights(linked.parent, config)
    assert WeightReader(index.root).read(index["final_norm.scale"]).shape == (96,)
    (blobs / "ckpt-0" / "tensor00003_000").unlink()
    (fault,) = faults_of(linked.parent, config)
    assert "tensor00003_000" in fault
    assert "link to a file that is not there" in fault


def test_first_layers_need_only_their_files(tmp_path: Path) -> None:
    whole, index = open_weights(DATA / "deep13")
    part, first = open_weights(DATA / "deep13", layers=3)
    assert part == dataclasses.replace(whole, num_layers=3)
    assert first.weights == {n: w for n, w in index.weights.items() if n in model_parameters(part)}
    assert first["layers.2.router.weight"].file == "ckpt-0/tensor00073_000"
    shutil.copytree(
        DATA / "deep13",
        tmp_path / "few",
        ignore=lambda _, names: {
            n for n in names if n.startswith("tensor") and f"ckpt-0/{n}" not in first.files
        },
    )
    _, few = open_weights(tmp_path / "few", layers=3)
    assert few.files == first.files
    assert len(few.files) == 2 + 3 * 12
    assert len(faults_of(tmp_path / "few")) == 10 * 12


@pytest.mark.parametrize("layers", [-1, 0, 3])
def test_too_many_layers_are_refused_with_both_numbers(layers: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"{layers} layers were asked for; .* has 2: use 1 to 2"
    ):
        open_weights(DATA / "tiny", layers=layers)


def test_every_fault_is_told_in_one_go(tiny: Path) -> None:
    files = tiny / "ckpt-0"
    (files / "tensor00002_000").unlink()
    data = (files / "tensor00003_000").read_bytes()
    (files / "tensor00003_000").write_bytes(data[:-1])
    (files / "tensor00005_000").write_bytes(b"")
    shutil.copy(files / "tensor00005_000", files / "tensor00026_000")
    shutil.copy(files / "tensor00006_000", files / "tensor00009_000")
    shutil.copy(files / "tensor00010_000", files / "tensor00013_000")
    shutil.copy(files / "tensor00010_000", files / "tensor00010_001")
    (files / "tensor00011_000").write_bytes(pickle.dumps(np.ones(96, np.int8), 4))
    (files / "tensor00012_000").write_bytes(b"x" * 1000)
    faults = "\n".join(faults_of(tiny))
    for expected in (
        "tensor00002_000 (layers.0.experts.gate.weight, layers.0.experts.gate.scales) is missing",
        "tensor00003_000 (layers.0.experts.down.weight, layers.0.experts.down.scales) "
        f"has {len(data) - 1} of {len(data)} bytes: fetch it again",
        "tensor00005_000 (layers.0.attention.key.weight, layers.0.attention.key.scales) "
        "has 0 of 3431 bytes: fetch it again",
        "tensor00012_000 (layers.0.post_moe_norm.scale) is no good: ",
        "tensor00026_000 is there, but is none of the 26 files",
        "tensor00009_000 (layers.0.pre_attn_norm.scale) holds weight, scales; needed are array",
        "tensor00010_001 is there, but",
        "tensor00013_000: layers.0.router.weight has shape (96,); the config asks for (96, 8)",
        "tensor00011_000: layers.0.pre_moe_norm.scale has dtype int8, not float32",
    ):
        assert expected in faults
    assert len(faults.splitlines()) == 9


def test_the_wrong_config_is_named_with_both_shapes(tiny: Path) -> None:
    shutil.copy(DATA / "tiny8" / "config.json", tiny / "config.json")
    with pytest.raises(CheckpointError) as caught:
        open_weights(tiny)
    text = str(caught.value)
    assert f"another model than {tiny / 'config.json'}" in text
    assert (
        "tensor00000_000: embedding.weight has shape (512, 96); the config asks for (640, 128)"
        in text
    )


def test_a_wrong_number_of_scale_groups_is_said_so() -> None:
    config, _ = open_weights(DATA / "tiny")
    wrong = dataclasses.replace(config, row_parallel_scale_groups=8)
    with pytest.raises(CheckpointError) as caught:
        open_weights(DATA / "tiny", wrong)
    assert len(caught.value.faults) == 4
    assert "the given config" in str(caught.value)
    assert (
        "tensor00003_000: layers.0.experts.down.scales has shape (8, 1, 96); the config asks for "
        "(8, 8, 96) (1 scale groups, not 8: row_parallel_scale_groups)"
    ) in caught.value.faults


def test_without_a_config_it_is_grok_1(tiny: Path) -> None:
    (tiny / "config.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_weights(tiny)
    text, faults = str(caught.value), caught.value.faults
    assert "the published Grok-1 (there is no config.json)" in text
    assert len(faults) > 744
    assert f"... and {len(faults) - 20} more" in text
    assert len(text.splitlines()) == 22


def test_an_unsafe_file_wins_over_all_faults(tiny: Path) -> None:
    (tiny / "ckpt-0" / "tensor00001_000").unlink()
    for number in (7, 9):
        evil = pickle.dumps(os.getcwd, 4)
        (tiny / "ckpt-0" / f"tensor{number:05}_000").write_bytes(evil)
    with pytest.raises(UnsafePickleError) as caught:
        open_weights(tiny)
    assert len(caught.value.faults) == 2
    assert "tensor00007_000 asks for 'posix.getcwd'" in caught.value.faults[0]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match="checkpoint"):
        open_weights(tmp_path / "x")


def test_a_store_is_recognised_and_checked(tmp_path: Path) -> None:
    config, index = open_weights(DATA / "tiny")
    written = write_store(IndexSource(config, index), tmp_path / "store")
    again_config, again = open_weights(tmp_path / "store")
    assert again_config == config
    assert again == WeightIndex(root=written.root, weights=again.weights, files=written.files)
    assert again.weights == written.weights
    _, first = open_weights(tmp_path / "store", layers=1)
    assert set(first.files) == {"embedding.safetensors", "layer_00.safetensors"}

    (tmp_path / "store" / "layer_01.safetensors").unlink()
    shutil.copy(
        tmp_path / "store" / "layer_00.safetensors", tmp_path / "store/layer_02.safetensors"
    )
    os.truncate(tmp_path / "store" / "layer_00.safetensors", 5000)
    faults = "\n".join(faults_of(tmp_path / "store"))
    assert "layer_00.safetensors" in faults
    assert "layer_01.safetensors" in faults
    assert "layer_02.safetensors is there" in faults
    open_faults = faults_of(tmp_path / "store", dataclasses.replace(config, emb_size=98))
    assert any("has shape (512, 96); the config asks for (512, 98)" in f for f in open_faults)


def test_a_checkpoint_of_full_size_is_opened_without_its_payload(tmp_path: Path) -> None:
    config = dataclasses.replace(GROK_1, num_layers=1)
    (tmp_path / "ckpt-0").mkdir()
    for file, parameters in released_files(config).items():
        write_released(tmp_path / "ckpt-0" / file, parameters, None)
    _, index = open_weights(tmp_path, config)
    assert sum(index.files.values()) > 8e9
    assert index["layers.0.experts.down.weight"].offset == 201
    assert index["layers.0.experts.down.weight"].groups == 8


def test_keys_of_a_file_are_the_parts_of_a_tensor() -> None:
    config, _ = open_weights(DATA / "tiny")
    for parameters in released_files(config).values():
        for key, parameter in parameters.items():
            assert isinstance(parameter, Parameter)
            assert key == "array" or parameter.name.endswith(f".{key}")
