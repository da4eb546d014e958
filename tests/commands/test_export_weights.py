"""`export-weights` from the command line: what it writes, what it says, what it refuses."""

import json
from collections import namedtuple
from pathlib import Path

import pytest

from export_grok.config import HEAD_DTYPES
from export_grok.export.demo import DEMO_MODEL
from tests.commands.conftest import Refused, Run

FILES = 1 + 2  # embedding and final norm, and a layer each


def test_safetensors_of_a_peer(done: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    said = done("export-weights", tiny, "--to", "hf", "--names", "keyfan", "--out", out)
    assert said.out.startswith(f"{out}: {FILES + 2} files, ")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert "transformer.decoder_layer.1.moe.7.linear_v.weight" in index["weight_map"]
    again = done("export-weights", tiny, "--to", "hf", "--names", "keyfan", "--out", out)
    assert f"{FILES + 2} of them there before" in again.out


def test_gguf_as_json(done: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "gguf"
    said = json.loads(done("export-weights", tiny, "--to", "gguf", "--out", out, "--json").out)
    assert said["files"] == {"model.gguf": (out / "model.gguf").stat().st_size}
    assert said["kept"] == []


def test_a_dry_run_writes_nothing(done: Run, tiny: Path, out: Path) -> None:
    said = done("export-weights", tiny, "--to", "gguf", "--out", out, "--dry-run")
    assert "of disk in" in said.out


def test_too_little_disk_is_said_before_anything_is_written(
    refused: Refused, tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**6, 10**6, 1000))
    said = refused("export-weights", tiny, "--to", "hf", "--out", out)
    assert "of free disk" in said


def test_a_note_says_what_the_peer_will_not_know(done: Run, tiny: Path, tmp_path: Path) -> None:
    said = done("export-weights", tiny, "--to", "hf", "--out", tmp_path / "hf")
    assert said.err.startswith("Note: vLLM scales attention logits by 1/sqrt(head size), 0.25")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--to", "hf", "--dtype", "int8"), "take --dtype bfloat16"),
        (("--to", "gguf", "--names", "keyfan"), "leave --names away"),
        (("--to", "hf", "--head", HEAD_DTYPES[1]), "leave it away"),
        (("--to", "hf", "--split"), "leave --split away"),
        (("--to", "hf", "--layers", 3), "3 layers were asked for"),
        (("--to", "onnx"), "'onnx' is not one of"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: tuple[object, ...], says: str, refused: Refused, tiny: Path, out: Path
) -> None:
    assert says in refused("export-weights", tiny, *options, "--out", out)


def test_a_model_that_llama_cpp_cannot_load_is_refused(refused: Refused, out: Path) -> None:
    said = refused("export-weights", DEMO_MODEL, "--to", "gguf", "--out", out)
    assert "must be as wide as the embedding, 192" in said


def test_a_folder_without_weights_is_refused(refused: Refused, out: Path, tmp_path: Path) -> None:
    said = refused("export-weights", tmp_path, "--to", "hf", "--out", out)
    assert "holds no checkpoint" in said
