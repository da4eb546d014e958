"""From a checkpoint to an engine in one call, and what becomes of it when things move or break."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export_grok.artifacts import MANIFEST, Bundle, open_bundle
from export_grok.config import ExportOptions
from export_grok.engines.backend import open_session
from export_grok.engines.ort.build import build_engine
from export_grok.engines.pipeline import engine_from_source
from export_grok.errors import BuildError, BundleError, CheckpointError, ConfigError
from export_grok.export.graph_folder import export_graphs
from export_grok.runtime.decode import decode
from export_grok.runtime.request import Request
from tests.bundles import checkpoint_copy, hashes
from tests.conftest import load_golden

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a copy of the tiny fixture's checkpoint, to be changed at will."""
    return checkpoint_copy("tiny", tmp_path / "checkpoint")


def built(source: Path, out: Path, **options: Any) -> Bundle:
    return engine_from_source(source, out, backend="ort", options=ExportOptions(**options))


def written(bundle: Bundle) -> Any:
    """Return the manifest as JSON has it."""
    return json.loads(json.dumps(bundle.manifest.to_dict()))


def made_at(folder: Path) -> dict[str, int]:
    """Return when each file was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def check_answers(bundle: Bundle) -> None:
    """Let the bundle continue the fixture's prompt: the answer is the original's."""
    golden = load_golden("tiny")
    prompt = tuple(int(token) for token in golden.arrays["tokens"][0])
    session = open_session(bundle, batch=1, max_length=40)
    answer = decode(session, [Request(prompt=prompt, max_new_tokens=8)])
    assert [step.token for step in answer] == golden.arrays["f32/decode_tokens"][0].tolist()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# One call is the two stages.


@pytest.mark.parametrize("copy_weights", [False, True])
def test_a_bundle_is_export_and_then_build(
    checkpoint: Path, tmp_path: Path, copy_weights: bool
) -> None:
    # Both lie at the same depth: a bundle says how to get from it to the weights.
    graphs = export_graphs(checkpoint, tmp_path / "two", ExportOptions(copy_weights=copy_weights))
    two = build_engine(graphs)
    one = built(checkpoint, tmp_path / "one", copy_weights=copy_weights)
    assert written(one) == written(two)
    assert hashes(one.folder) == hashes(two.folder)
    assert written(open_bundle(one.folder, kind="engine")) == written(one)
    check_answers(one)


def test_graphs_get_their_engine_in_their_own_folder(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    graphs = export_graphs(checkpoint, folder)
    with pytest.raises(BundleError, match="build-engine"):
        open_bundle(folder, kind="engine")
    before = hashes(folder)
    bundle = engine_from_source(folder, None, backend="ort")
    assert bundle.folder == folder
    after = hashes(folder)
    del before[MANIFEST]
    assert before.items() <= after.items()  # the graphs stay, and stay as they are
    assert set(after) - set(before) - {MANIFEST} == {
        f"{stem}.ort.onnx" for stem in ("embedding", "head", "head_all", "layer_00", "layer_01")
    }
    assert bundle.manifest.files.items() > graphs.manifest.files.items()
    check_answers(bundle)
    assert written(built(folder, folder)) == written(bundle)


def test_a_folder_of_graphs_takes_no_other_out(checkpoint: Path, tmp_path: Path) -> None:
    export_graphs(checkpoint, tmp_path / "graphs")
    with pytest.raises(ConfigError, match="leave --out away"):
        built(tmp_path / "graphs", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_a_checkpoint_needs_an_out(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="--out"):
        engine_from_source(checkpoint, None, backend="ort")


def test_an_unknown_backend_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="abacus"):
        engine_from_source(checkpoint, tmp_path / "out", backend="abacus")
    assert not (tmp_path / "out").exists()


# Made once.


@pytest.mark.parametrize("copy_weights", [False, True])
def test_building_again_writes_nothing(
    checkpoint: Path, tmp_path: Path, copy_weights: bool
) -> None:
    first = built(checkpoint, tmp_path / "out", copy_weights=copy_weights)
    before = made_at(tmp_path / "out")
    again = built(checkpoint, tmp_path / "out", copy_weights=copy_weights)
    assert written(again) == written(first)
    assert made_at(tmp_path / "out") == before


def change_weight(checkpoint: Path) -> dict[str, Any]:
    weight = load_golden("tiny").index["layers.1.experts.up.weight"]
    flip(checkpoint / weight.file, weight.offset + weight.nbytes - 1)
    return {}


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "a byte of a weight": change_weight,
    "layers": lambda checkpoint: {"layers": 1},
    "copied weights": lambda checkpoint: {"copy_weights": True},
    "config": lambda checkpoint: {
        "config": dataclasses.replace(load_golden("tiny").config, attn_logit_cap=20.0)
    },
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_bundle_of_something_else_is_replaced_only_when_asked(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], dict[str, Any]]
) -> None:
    out = tmp_path / "out"
    built(checkpoint, out)
    before = made_at(out)
    options = change(checkpoint)
    with pytest.raises(BundleError, match="--overwrite") as error:
        built(checkpoint, out, **options)
    assert "\n" not in str(error.value)
    assert made_at(out) == before
    replaced = built(checkpoint, out, overwrite=True, **options)
    fresh = built(checkpoint, tmp_path / "fresh", **options)
    assert written(replaced) == written(fresh)
    assert hashes(out) == hashes(tmp_path / "fresh")
    assert written(open_bundle(out, kind="engine")) == written(fresh)


def test_another_dtype_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    built(checkpoint, out)
    before = made_at(out)
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"bfloat16.*--dtype float32"):
            built(checkpoint, out, dtype="bfloat16", overwrite=overwrite)
    with pytest.raises(BundleError, match="--overwrite"):
        export_graphs(checkpoint, out, ExportOptions(dtype="bfloat16"))
    assert made_at(out) == before


def test_graphs_of_another_dtype_replace_a_bundle_and_are_replaced(
    checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = hashes(built(checkpoint, out).folder)
    export_graphs(checkpoint, out, ExportOptions(dtype="bfloat16", overwrite=True))
    assert open_bundle(out, kind="graphs").manifest.dtype == "bfloat16"
    assert not list(out.glob("*.ort.onnx"))
    with pytest.raises(BuildError, match=r"bfloat16.*--dtype float32"):
        engine_from_source(out, None, backend="ort")
    assert hashes(built(checkpoint, out, overwrite=True).folder) == first


def test_a_folder_with_something_else_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(BundleError, match="not empty"):
            built(checkpoint, tmp_path / "out", overwrite=overwrite)
    assert hashes(tmp_path / "out").keys() == {"thesis.txt"}


def test_what_was_begun_is_removed_when_the_checkpoint_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "ckpt-0" / "tensor00003_000").unlink()
    with pytest.raises(CheckpointError, match="tensor00003_000"):
        built(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Unfinished or damaged.


def test_a_folder_without_a_manifest_does_not_load(checkpoint: Path, tmp_path: Path) -> None:
    bundle = built(checkpoint, tmp_path / "out")
    (bundle.folder / MANIFEST).unlink()
    with pytest.raises(BundleError, match=f"no {MANIFEST}"):
        open_bundle(bundle.folder)


@pytest.mark.parametrize(
    "file",
    ["layer_01.onnx", "layer_00.ort.onnx", "weights.json", "checkpoint/ckpt-0/tensor00004_000"],
)
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_file_that_changed_is_named(
    checkpoint: Path, tmp_path: Path, file: str, damage: str
) -> None:
    bundle = built(checkpoint, tmp_path / "out")
    path = tmp_path / file if file.startswith("checkpoint") else bundle.folder / file
    if damage == "flipped":
        flip(path, path.stat().st_size // 2)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(BundleError) as error:
        open_bundle(bundle.folder)
    assert str(path) in str(error.value)
    others = {*bundle.manifest.files, *bundle.manifest.weight_files} - {path.name, file}
    others -= {f"ckpt-0/{path.name}"}
    assert not [other for other in others if f"/{other} " in str(error.value)]


# Moved.


def test_copied_weights_move_with_their_bundle(checkpoint: Path, tmp_path: Path) -> None:
    built(checkpoint, tmp_path / "out", copy_weights=True)
    (tmp_path / "far" / "away").mkdir(parents=True)
    moved = (tmp_path / "out").rename(tmp_path / "far" / "away" / "bundle")
    shutil.rmtree(checkpoint)
    check_answers(open_bundle(moved, kind="engine"))


def test_a_bundle_and_its_checkpoint_may_be_moved_together(
    checkpoint: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    checkpoint.rename(disk / "checkpoint")
    built(disk / "checkpoint", disk / "bundles" / "out")
    disk.rename(tmp_path / "other_disk")
    check_answers(open_bundle(tmp_path / "other_disk" / "bundles" / "out", kind="engine"))


def test_a_bundle_alone_may_be_moved_away_from_its_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    built(checkpoint, tmp_path / "out")
    (tmp_path / "far" / "away").mkdir(parents=True)
    moved = (tmp_path / "out").rename(tmp_path / "far" / "away" / "bundle")
    check_answers(open_bundle(moved, kind="engine"))


def test_weights_that_were_moved_are_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    built(checkpoint, tmp_path / "out")
    moved = checkpoint.rename(tmp_path / "moved")
    with pytest.raises(BundleError, match="--weights-root") as error:
        open_bundle(tmp_path / "out")
    assert str(checkpoint / "ckpt-0" / "tensor00000_000") in str(error.value)
    check_answers(open_bundle(tmp_path / "out", kind="engine", weights_root=moved))


def test_a_weights_root_with_other_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    built(checkpoint, tmp_path / "out")
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    change_weight(other)
    with pytest.raises(BundleError, match="has changed since the bundle was made") as error:
        open_bundle(tmp_path / "out", weights_root=other)
    assert "--weights-root" in str(error.value)
    with pytest.raises(BundleError, match="No such file"):
        open_bundle(tmp_path / "out", weights_root=tmp_path / "nowhere")


# In the checkpoint's own folder.


def test_in_the_checkpoints_own_folder_any_onnx_tool_finds_the_weights(checkpoint: Path) -> None:
    bundle = built(checkpoint, checkpoint)
    for path in sorted(checkpoint.glob("*.onnx")):
        if ".template." not in path.name and ".ort." not in path.name:
            onnx.checker.check_model(str(path), full_check=True)
            model = onnx.load(path)  # with the weights
            assert all(tensor.raw_data or tensor.dims for tensor in model.graph.initializer)
    check_answers(open_bundle(checkpoint, kind="engine"))
    before = made_at(checkpoint)
    assert written(built(checkpoint, checkpoint)) == written(bundle)
    assert made_at(checkpoint) == before


# Links.


def linked(checkpoint: Path, what: str) -> None:
    """Put a file, or all of them, elsewhere and a link in its place."""
    place = checkpoint / what
    there = checkpoint.parent / "elsewhere" / place.name
    there.parent.mkdir()
    place.rename(there)
    place.symlink_to(there)


@pytest.mark.parametrize("what", ["ckpt-0/tensor00003_000", "ckpt-0"])
def test_links_out_of_the_checkpoint_need_copied_weights(
    checkpoint: Path, tmp_path: Path, what: str
) -> None:
    linked(checkpoint, what)
    with pytest.raises(CheckpointError, match="--weights copy") as error:
        built(checkpoint, tmp_path / "out")
    assert "tensor00003_000" in str(error.value) or what == "ckpt-0"
    assert str(tmp_path / "elsewhere") in str(error.value)
    assert not (tmp_path / "out").exists()
    check_answers(built(checkpoint, tmp_path / "out", copy_weights=True))


def test_a_checkpoint_that_is_itself_a_link_may_be_pointed_at(
    checkpoint: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    bundle = built(link, tmp_path / "out")
    assert json.loads((bundle.folder / MANIFEST).read_text())["weights"]["relative"] == (
        "../checkpoint"
    )
    link.unlink()
    check_answers(open_bundle(bundle.folder, kind="engine"))


def test_the_first_layers_alone_make_a_smaller_model(checkpoint: Path, tmp_path: Path) -> None:
    golden = load_golden("tiny")
    bundle = built(checkpoint, tmp_path / "out", layers=1)
    assert bundle.config == dataclasses.replace(golden.config, num_layers=1)
    assert {name for name in bundle.manifest.files if name.startswith("layer_")} == {
        "layer_00.onnx",
        "layer_00.ort.onnx",
    }
    session = open_session(bundle, batch=2, max_length=24)
    tokens = golden.arrays["tokens"].astype(np.int64)
    whole = golden.arrays["f32/prefill_logits"]
    assert np.abs(session.forward_all(tokens, np.zeros(2, np.int64)) - whole).max() > 0.1


def test_a_checkpoint_that_holds_its_own_graphs_is_still_a_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    built(checkpoint, checkpoint)
    elsewhere = built(checkpoint, tmp_path / "elsewhere")
    assert elsewhere.folder == tmp_path / "elsewhere"
    assert engine_from_source(checkpoint, None, backend="ort").folder == checkpoint
    with pytest.raises(BundleError, match="--overwrite"):
        built(checkpoint, checkpoint, layers=1)
    assert built(checkpoint, checkpoint, layers=1, overwrite=True).config.num_layers == 1


def test_an_overwritten_bundle_leaves_nothing_of_itself(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    built(checkpoint, out, copy_weights=True)
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    (out / "layer_01.onnx").write_bytes(b"damaged")
    bundle = built(checkpoint, out, layers=1, overwrite=True)
    found = {path.name for path in out.rglob("*") if path.is_file()}
    ours = {*bundle.manifest.files, "manifest.json", "notes.txt"}
    assert found - ours <= {"config.json"}  # of the store, which names no model's weights


def test_a_kill_while_a_bundle_is_overwritten_does_not_block_its_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    built(checkpoint, out)

    def killed(_folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as planted:
        planted.setattr("export_grok.export.plan._remove_bundle", killed)
        with pytest.raises(KeyboardInterrupt):
            built(checkpoint, out, layers=1, overwrite=True)
    assert built(checkpoint, out, layers=1, overwrite=True).config.num_layers == 1


def test_a_manifest_is_read_as_it_was_written(checkpoint: Path, tmp_path: Path) -> None:
    bundle = built(checkpoint, tmp_path / "out")
    assert open_bundle(bundle.folder).manifest == bundle.manifest
