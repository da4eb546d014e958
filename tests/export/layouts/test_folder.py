"""Which files of a folder are read, and what is said of those that cannot be."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from export_grok.errors import CheckpointError, UnsafePickleError
from export_grok.export.layouts import foreign_source
from export_grok.export.layouts.folder import read_folder
from tests.conftest import load_golden
from tests.export.layouts.written import floats, hf_config, save_bin, save_safetensors, tensors


def one(name: str = "w") -> dict[str, torch.Tensor]:
    return {name: torch.ones(3)}


def index(folder: Path, places: Any, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_without_an_index_all_files_are_read(tmp_path: Path) -> None:
    save_file(one("a"), tmp_path / "a.safetensors")
    save_file(one("b"), tmp_path / "b.safetensors")
    folder = read_folder(tmp_path)
    assert set(folder.tensors) == {"a", "b"}
    assert folder.lengths == {
        f"{n}.safetensors": (tmp_path / f"{n}.safetensors").stat().st_size for n in "ab"
    }


def test_an_index_says_which_files_are_read_and_what_is_missing(tmp_path: Path) -> None:
    save_file(one("a"), tmp_path / "a.safetensors")
    save_file(one("old"), tmp_path / "old.safetensors")
    index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    folder = read_folder(tmp_path)
    assert set(folder.tensors) == {"a"}
    assert folder.missing == {"b.safetensors": ["b"]}


def test_safetensors_are_preferred_to_what_torch_wrote(tmp_path: Path) -> None:
    save_file(one("a"), tmp_path / "model.safetensors")
    torch.save(one("b"), tmp_path / "pytorch_model.bin")
    (tmp_path / "training_args.bin").write_bytes(b"no weights")
    assert set(read_folder(tmp_path).tensors) == {"a"}


@pytest.mark.parametrize(
    ("file", "rank"),
    [
        ("pytorch_model-00001-TP-005.safetensors", 5),
        ("model-TP-common.safetensors", None),
        ("model-00003-of-00019.safetensors", None),
        ("model-003.safetensors", None),
        ("ckpt-011.bin", 11),
        ("pytorch_model-00001-of-00019.bin", None),
        ("pytorch_model.bin", None),
    ],
)
def test_a_name_says_which_rank_a_file_is_for(file: str, rank: int | None, tmp_path: Path) -> None:
    (torch.save if file.endswith(".bin") else save_file)(one(), tmp_path / file)
    (found,) = read_folder(tmp_path).tensors["w"]
    assert found.rank == rank


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": 3}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": "../a.safetensors"}}',
        b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": "sub/a.safetensors"}}',
        b'{"weight_map": {"a": ""}}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_an_index_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json is no index of weights"):
        read_folder(tmp_path)


def test_two_indices_are_refused(tmp_path: Path) -> None:
    index(tmp_path, {})
    index(tmp_path, {}, "model.fp8.safetensors.index.json")
    with pytest.raises(CheckpointError, match="holds 2 indices"):
        read_folder(tmp_path)


def test_a_folder_without_weights_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither ckpt-0.* nor \.safetensors, nor \.bin"):
        read_folder(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        read_folder(tmp_path / "none")


def test_all_damaged_files_are_named_beside_other_faults(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    theirs = tensors("hpcai", floats(golden)) | {"model.extra": torch.ones(1)}
    save_safetensors(tmp_path, theirs, 4)
    files = sorted(tmp_path.iterdir())
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(golden.config)))
    with pytest.raises(CheckpointError) as caught:
        foreign_source(tmp_path, groups=1)
    assert len(caught.value.faults) == 3
    for said in ("model-00002-of-00004", "model-00003-of-00004", "model.extra"):
        assert said in str(caught.value)


def test_a_folder_of_damaged_files_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="holds no file that is whole"):
        foreign_source(tmp_path)


def test_one_file_that_would_run_something_is_enough_to_refuse_all(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    save_bin(tmp_path, tensors("keyfan", floats(load_golden("tiny"))), 2)
    torch.save({"w": Runs()}, tmp_path / "pytorch_model-00003-of-00003.bin")
    with pytest.raises(UnsafePickleError, match=r"not to be trusted[^$]*00003-of-00003.*system"):
        foreign_source(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_links_to_files_elsewhere_are_followed(tmp_path: Path) -> None:
    """Downloads of hubs are such folders: names that are links to a store of contents."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    snapshot.mkdir()
    golden = load_golden("tiny")
    save_safetensors(blobs, tensors("xai", floats(golden)))
    (blob,) = blobs.iterdir()
    (snapshot / "model.safetensors").symlink_to(blob)
    assert foreign_source(snapshot, golden.config).files == {
        "model.safetensors": blob.stat().st_size
    }
