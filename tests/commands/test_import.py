"""`import` writes a store from any layout, once, and says what it did or what is wrong."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from export_grok.artifacts import TOKENIZER
from export_grok.export.checkpoint import open_weights
from export_grok.export.store.folder import IMPORT_PLAN, STORE_MANIFEST
from export_grok.export.store.manifest import StoreManifest
from export_grok.weights import WeightReader
from tests.bundles import checkpoint_copy, hashes
from tests.commands.conftest import Refused, Run
from tests.conftest import DATA, Golden, load_golden
from tests.parity import FLOAT32_TOLERANCE

FILES = {"config.json", "embedding.safetensors", "layer_00.safetensors", "layer_01.safetensors"}
FULL = "No space left on device; free some space or choose another --out"


@pytest.fixture
def store(done: Run, tiny: Path, tmp_path: Path) -> Path:
    """Return a store that a test may damage."""
    done("import", tiny, tmp_path / "store")
    return tmp_path / "store"


def logits(done: Run, store: Path, golden: Golden, folder: Path) -> np.ndarray:
    """Return what an engine of the store computes for the fixture's prompt."""
    np.save(folder / "tokens.npy", golden.arrays["tokens"])
    done("build-engine", store, "--out", folder / "engine")
    out = folder / "logits.npz"
    done("logits", folder / "engine", "--tokens", folder / "tokens.npy", "--out", out)
    with np.load(out) as file:
        found: np.ndarray = file["logits"]
    return found


@pytest.mark.usefixtures("traced_once")
def test_an_engine_of_the_store_computes_what_the_original_did(
    done: Run, store: Path, tmp_path: Path
) -> None:
    golden = load_golden("tiny")
    found = logits(done, store, golden, tmp_path)
    assert np.abs(found - golden.arrays["f32/prefill_logits"]).max() < FLOAT32_TOLERANCE


def test_it_says_what_it_wrote_and_that_nothing_is_left_to_do(
    done: Run, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = done("import", tiny, out)
    assert first.out.startswith(
        f"{out}: store of 2 layers from 26 files in layout released, 1,455,488 bytes of tensors; "
        "1,455,488 written in "
    )
    assert (first.out.count("\n"), first.err) == (1, "")
    assert set(hashes(out)) == FILES | {STORE_MANIFEST}
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = done("import", tiny, out)
    assert again.out.endswith("; all of it was there\n")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    one = done("import", tiny, out, "--layers", 1, "--overwrite")
    assert one.out.startswith(f"{out}: store of 1 layer from 14 files")
    assert set(hashes(out)) == FILES - {"layer_01.safetensors"} | {STORE_MANIFEST}


def test_json_tells_all_of_it(done: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = json.loads(done("import", tiny, out, "--json", "--workers", 1).out)
    manifest = StoreManifest.read(out)
    assert manifest is not None
    assert told["files"] == manifest.files
    assert told["plan"] == manifest.plan
    assert told["written"] == told["bytes"] == 1_455_488
    assert told["bytes_per_second"] == pytest.approx(told["written"] / told["seconds"])
    assert told["source"] == {
        "root": str(tiny),
        "files": 26,
        "bytes": sum(path.stat().st_size for path in (tiny / "ckpt-0").iterdir()),
    }
    assert (told["layout"], told["layers"], told["tensors"]) == ("released", 2, 40)
    assert told["quantised"] == []
    again = json.loads(done("import", tiny, out, "--json").out)
    assert (again["written"], again["bytes"]) == (0, 1_455_488)


def test_hashes_of_source_files_are_those_of_sha256sum(store: Path, tiny: Path) -> None:
    """Users hold them to what was published."""
    source = json.loads((store / STORE_MANIFEST).read_bytes())["source"]
    assert source == {
        f"ckpt-0/{path.name}": {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted((tiny / "ckpt-0").iterdir())
    }


def test_a_store_of_a_store_of_13_layers_is_the_same_model(done: Run, tmp_path: Path) -> None:
    done("import", DATA / "deep13", tmp_path / "one")
    assert "in layout store" in done("import", tmp_path / "one", tmp_path / "two").out
    _, index = open_weights(tmp_path / "two")
    golden = load_golden("deep13")
    ours, released = WeightReader(index.root), WeightReader(golden.index.root)
    for name, weight in golden.index.weights.items():
        assert ours.read(index[name]).tobytes() == released.read(weight).tobytes()


def test_a_dry_run_says_what_it_needs_and_writes_nothing(
    done: Run, refused: Refused, tiny: Path, out: Path
) -> None:
    told = done("import", tiny, out, "--dry-run").out.splitlines()
    assert f"MB of disk in {out} (" in told[0]
    assert told[1:] == [f"writes a store into {out}"]
    assert not out.exists()
    (tiny / "ckpt-0" / "tensor00003_000").unlink()
    assert "tensor00003_000" in refused("import", tiny, out, "--dry-run")


def test_too_little_disk_is_told_with_both_figures_unless_forced(
    done: Run, refused: Refused, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    text = refused("import", tiny, out)
    assert f"{out} has " in text
    assert "of free disk" in text
    assert not out.exists()
    done("import", tiny, out, "--force")


def test_groups_of_weights_that_are_int8_must_be_theirs(
    done: Run, refused: Refused, tiny: Path, tmp_path: Path
) -> None:
    text = refused("import", tiny, tmp_path / "out", "--groups", 8)
    assert "is int8 already, with 1 groups of rows, not 8: leave --groups away" in text
    done("import", tiny, tmp_path / "out", "--groups", 1)


# Weights in the layouts of others.


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fixture's weights as another program's, in bfloat16; they are shared."""
    import torch

    from tests.export.layouts.written import floats, hf_config, save_safetensors, tensors

    folder = tmp_path_factory.mktemp("published")
    golden = load_golden("tiny8")
    written = tensors("hpcai", floats(golden), torch.bfloat16)
    save_safetensors(folder, written, files=3, index=True)
    (folder / "config.json").write_text(json.dumps(hf_config(golden.config)))
    (folder / TOKENIZER).write_bytes(b"tokens")
    return folder


def test_weights_of_another_layout_are_made_int8_and_their_error_is_told(
    done: Run, published: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told = done("import", published, out, "--groups", 8).out.splitlines()
    assert "from 3 files in layout hpcai" in told[0]
    assert told[1].startswith("made int8: 21 matrices; |error| / |float|, the worst: layers.")
    assert len(told) == 2
    config, index = open_weights(out)
    golden = load_golden("tiny8")
    assert config == golden.config
    assert (out / TOKENIZER).read_bytes() == b"tokens"
    manifest = StoreManifest.read(out)
    assert manifest is not None
    assert {path: file.sha256 for path, file in manifest.source.items()} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in published.glob("*.safetensors")
    }
    ours, released = WeightReader(index.root), WeightReader(golden.index.root)
    for name, tensor in manifest.tensors.items():
        found = ours.read(index[name])
        assert hashlib.sha256(found.tobytes()).hexdigest() == tensor.sha256
        if tensor.dtype == "int8":
            assert 0 <= (manifest.errors[name].relative_error or 0) < 0.01
            assert np.abs(found.astype(int) - released.read(golden.index[name])).max() <= 1
    again = json.loads(done("import", published, out, "--groups", 8, "--json").out)
    worst = [error["relative_error"] for error in again["quantised"]]
    assert (len(worst), worst) == (21, sorted(worst, reverse=True))
    assert again["written"] == 0


def test_a_broken_off_import_of_another_layout_goes_on_to_the_same(
    done: Run, run: Run, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done("import", published, tmp_path / "whole", "--groups", 4)
    real, left = os.pwrite, [60]

    def pwrite(file: int, block: memoryview, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(file, block, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        arguments = ("import", published, tmp_path / "out", "--groups", 4, "--workers", 1)
        assert run(*arguments).code == 130
    assert (tmp_path / "out" / "layer_00.safetensors").exists()
    done("import", published, tmp_path / "out", "--groups", 4)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


# What is wrong with the source.


def test_what_is_missing_cut_or_empty_is_named_at_once_and_nothing_is_written(
    refused: Refused, tiny: Path, out: Path
) -> None:
    (tiny / "ckpt-0" / "tensor00003_000").unlink()
    os.truncate(tiny / "ckpt-0" / "tensor00005_000", 1000)
    os.truncate(tiny / "ckpt-0" / "tensor00008_000", 0)
    lines = refused("import", tiny, out).splitlines()
    assert "(3 faults)" in lines[0]
    assert [name for line in lines[1:] for name in ("03_000", "05_000", "08_000") if name in line]
    assert len(lines) == 4


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch])
def test_what_is_no_checkpoint_is_refused(
    make: object, refused: Refused, out: Path, tmp_path: Path
) -> None:
    assert callable(make)
    make(tmp_path / "x")
    assert str(tmp_path / "x") in refused("import", tmp_path / "x", out)


def test_a_source_that_shrinks_while_it_is_read_is_named(
    refused: Refused, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        return real(file, buffers, offset) if offset < 1000 else 0

    monkeypatch.setattr(os, "preadv", preadv)
    text = refused("import", tiny, tmp_path / "out", "--workers", 1)
    assert "get it again" in text
    assert not list((tmp_path / "out").glob(".*.partial"))


# What is wrong with the place.


def test_a_place_that_cannot_be_written_is_told(
    refused: Refused, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        text = refused("import", tiny, out, code=1)
        assert text.startswith(f"cannot write {out}: ")
        assert "\n" not in text


@pytest.mark.parametrize("blocks", [0, 1, 25])
def test_a_full_disk_is_told_and_the_next_run_goes_on(
    blocks: int,
    done: Run,
    refused: Refused,
    store: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, left, real = tmp_path / "out", [blocks], os.pwrite

    def pwrite(file: int, block: memoryview, offset: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return real(file, block, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        text = refused("import", tiny, out, "--workers", 1, code=1)
    assert text.startswith(f"cannot write {out}")
    assert text.endswith(FULL)
    assert "half made" in refused("index", out)
    assert not list(out.glob(".*.partial"))
    done("import", tiny, out)
    assert hashes(out) == hashes(store)


def test_what_is_half_made_is_refused_by_every_stage(
    refused: Refused, done: Run, store: Path, tiny: Path, tmp_path: Path
) -> None:
    before = hashes(store)
    shutil.copy(store / STORE_MANIFEST, store / IMPORT_PLAN)
    done("index", store)  # broken off behind its manifest
    (store / STORE_MANIFEST).unlink()
    for command in (["index"], ["inspect"], ["import", tmp_path / "a"], ["export", "--out", "b"]):
        text = refused(command[0], store, *command[1:])
        assert f"{store} is half made" in text
        assert "run export-grok import again" in text
    assert not (tmp_path / "a").exists()
    assert "replace it with --overwrite" in refused("import", tiny, store)
    done("import", tiny, store, "--overwrite")
    assert hashes(store) == before


def test_a_folder_that_holds_something_else_is_left_alone(
    refused: Refused, tiny: Path, tmp_path: Path
) -> None:
    other = checkpoint_copy("deep13", tmp_path / "other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(b"precious")
    for out in (other, tmp_path / "mine"):
        before = hashes(out)
        for more in ([], ["--overwrite"]):
            assert "is not empty and holds no store" in refused("import", tiny, out, *more)
        assert hashes(out) == before
