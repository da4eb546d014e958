"""An import is whole or refused at every moment, and goes on to the same bytes when run again."""

import dataclasses
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from export_grok.artifacts import TOKENIZER
from export_grok.errors import BundleError, CheckpointError, OutputError
from export_grok.export.checkpoint import holds_weights, open_weights
from export_grok.export.index_source import IndexSource
from export_grok.export.open_source import open_source
from export_grok.export.store.folder import IMPORT_PLAN, STORE_MANIFEST, write_store
from export_grok.export.store.importing import Import, planned_import
from export_grok.export.store.manifest import StoreManifest
from export_grok.export.tensor_source import TensorSource
from export_grok.weights import WeightReader
from tests.bundles import checkpoint_copy, hashes
from tests.conftest import DATA

TINY = DATA / "tiny"


def planned(
    source: Path, out: Path, *, layers: int | None = None, overwrite: bool = False
) -> Import:
    return planned_import(open_source(source, layers=layers), out, overwrite=overwrite)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with a tokenizer; it is shared."""
    folder = checkpoint_copy("tiny", tmp_path_factory.mktemp("source") / "tiny")
    (folder / TOKENIZER).write_bytes(b"tokens")
    return folder


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the store of it; it is shared."""
    out = tmp_path_factory.mktemp("whole") / "store"
    planned(checkpoint, out).run()
    return out


def tensors(folder: Path) -> dict[str, bytes]:
    _, index = open_weights(folder)
    reader = WeightReader(index.root)
    return {name: reader.read(weight).tobytes() for name, weight in index.weights.items()}


def test_a_store_holds_weights_tokenizer_config_and_manifest(
    checkpoint: Path, whole: Path
) -> None:
    assert set(hashes(whole)) == {
        "config.json",
        "embedding.safetensors",
        "layer_00.safetensors",
        "layer_01.safetensors",
        STORE_MANIFEST,
        TOKENIZER,
    }
    assert (whole / TOKENIZER).read_bytes() == b"tokens"
    assert tensors(whole) == tensors(checkpoint)
    assert open_weights(whole)[0] == open_weights(checkpoint)[0]


def test_the_folder_of_the_files_itself_finds_config_and_tokenizer_beside_it(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    planned(checkpoint / "ckpt-0", tmp_path / "out").run()
    assert tensors(tmp_path / "out") == tensors(whole)
    assert (tmp_path / "out" / TOKENIZER).exists()


def test_what_is_there_already_is_left_alone(checkpoint: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    again = planned(checkpoint, whole)
    assert again.done
    assert (again.needs().disk, again.nbytes) == ((), 0)
    assert again.run() == StoreManifest.read(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before


# Every moment: the folder as it is before each change that lasts, and in the middle of each file.


@contextmanager
def moments(out: Path, folder: Path) -> Iterator[list[Path]]:
    """Keep a copy of `out` as a kill would leave it before renames, removals and some blocks."""
    kept: list[Path] = []
    written = itertools.count()

    def keep() -> None:
        if out.exists():
            kept.append(shutil.copytree(out, folder / str(len(kept))))

    def first(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if real is not write or next(written) % 8 == 5:
                keep()
            return real(*arguments, **options)

        return call

    folder.mkdir()
    write = os.pwrite
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "pwrite")):
            patch.setattr(owner, name, first(getattr(owner, name)))
        yield kept
    keep()


def test_killed_at_any_moment_it_is_refused_and_goes_on_to_the_same(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with moments(out, tmp_path / "moments") as kept:
        planned(checkpoint, out).run(workers=1)
    assert hashes(out) == hashes(whole)
    assert len(kept) > 12
    loaded = 0
    for moment in kept:
        try:
            assert tensors(moment) == tensors(whole)
            loaded += 1
        except CheckpointError as error:
            assert "half made" in str(error) or "holds no checkpoint" in str(error)
        planned(checkpoint, moment).run()
        assert hashes(moment) == hashes(whole)
    assert loaded == 2  # before the plan is removed, and after


@pytest.mark.parametrize("older", [False, True], ids=["a store", "a store without a manifest"])
def test_killed_while_it_replaces_another_store_it_is_never_half_of_two(
    older: bool, checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if older:
        write_store(IndexSource(*open_weights(DATA / "deep13", layers=4)), out)
    else:
        planned(DATA / "deep13", out, layers=4).run()
    old, new = tensors(out), tensors(whole)
    with moments(out, tmp_path / "moments") as kept:
        planned(checkpoint, out, overwrite=True).run(workers=1)
    assert hashes(out) == hashes(whole)
    seen = set()
    for moment in kept:
        try:
            found = tensors(moment)
            assert found in (old, new)
            seen.add(found == new)
        except CheckpointError as error:
            assert "half made" in str(error)
        planned(checkpoint, moment, overwrite=True).run()
        assert hashes(moment) == hashes(whole)
    assert seen == {False, True}


def test_what_was_written_before_a_kill_is_not_written_again(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with moments(out, tmp_path / "moments") as kept:
        planned(checkpoint, out).run(workers=1)
    for moment in kept:
        there = {
            path: path.stat().st_mtime_ns for path in moment.glob("*.safetensors") if path.exists()
        }
        again = planned(checkpoint, moment)
        assert len(again.kept) == len(there)
        counted: list[int] = []
        again.run(progress=counted.append)
        assert sum(counted) in (0, again.total)
        assert {path: path.stat().st_mtime_ns for path in there} == there
    del whole


def test_a_file_that_was_damaged_or_lost_is_written_again(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "layer_00.safetensors").unlink()
    os.truncate(out / "layer_01.safetensors", 5000)
    again = planned(checkpoint, out)
    assert [file.name for file in again.missing] == [
        "layer_00.safetensors",
        "layer_01.safetensors",
    ]
    again.run()
    assert hashes(out) == hashes(whole)


def test_a_manifest_that_does_not_say_what_the_files_do_is_written_again(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    value = json.loads((out / STORE_MANIFEST).read_bytes())
    value["tensors"]["final_norm.scale"]["sha256"] = "0" * 64
    (out / STORE_MANIFEST).write_text(json.dumps(value))
    again = planned(checkpoint, out)
    assert not again.done
    again.run()
    assert hashes(out) == hashes(whole)


# What the folder may hold.


def test_another_store_is_replaced_only_when_told_to(whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    before = hashes(out)
    for source, layers, said in (
        (DATA / "deep13", None, "num_layers 2, not 13"),
        (TINY, 1, "num_layers 2, not 1"),
        (whole, None, "layout released, not store"),
    ):
        with pytest.raises(BundleError, match=f"{said}; replace it with --overwrite"):
            planned(source, out, layers=layers)
    assert hashes(out) == before
    (out / "mine.txt").write_bytes(b"precious")
    planned(DATA / "deep13", out, layers=1, overwrite=True).run()
    assert open_weights(out)[0].num_layers == 1
    assert (out / "mine.txt").read_bytes() == b"precious"
    assert not (out / "layer_01.safetensors").exists()


def test_a_half_made_store_of_something_else_is_named_so(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    (out / STORE_MANIFEST).unlink()
    planned(checkpoint, tmp_path / "other", layers=1).run()
    plan = planned(checkpoint, tmp_path / "any", layers=1).plan
    (out / IMPORT_PLAN).write_text(json.dumps(plan))
    with pytest.raises(BundleError, match="half-made store of num_layers 1, not 2; run its imp"):
        planned(checkpoint, out)
    config = {"config": plan["config"]}
    for text in ("", "{", "[]", "{}", '{"config": 1}', '{"config": {}}', json.dumps(config)):
        (out / IMPORT_PLAN).write_text(text)
        with pytest.raises(BundleError, match="half-made store of other weights or options"):
            planned(checkpoint, out)
    planned(checkpoint, out, overwrite=True).run()
    assert hashes(out) == hashes(whole)


def test_weights_that_changed_are_other_weights(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    changed = shutil.copytree(checkpoint, tmp_path / "changed")
    path = changed / "ckpt-0" / "tensor00013_000"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    out = shutil.copytree(whole, tmp_path / "out")
    with pytest.raises(BundleError, match="a store of other weights; replace"):
        planned(changed, out)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_store_is_left_alone(overwrite: bool, checkpoint: Path, tmp_path: Path) -> None:
    released = checkpoint_copy("deep13", tmp_path / "released")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_bytes(b"precious")
    for out in (released, released / "ckpt-0", tmp_path / "mine"):
        before = hashes(out)
        with pytest.raises(BundleError, match="is not empty and holds no store"):
            planned(checkpoint, out, overwrite=overwrite)
        assert hashes(out) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_it_is_not_written_among_what_is_read(
    overwrite: bool, whole: Path, checkpoint: Path, tmp_path: Path
) -> None:
    store = shutil.copytree(whole, tmp_path / "store")
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in store.iterdir():
        (linked / path.name).symlink_to(path)
    (tmp_path / "by_link").symlink_to(store)
    for source, out in (
        (checkpoint, checkpoint),
        (checkpoint, checkpoint / "ckpt-0"),
        (checkpoint / "ckpt-0", checkpoint / "ckpt-0"),
        (store, store),
        (store, tmp_path / "by_link"),
        (linked, store),
    ):
        with pytest.raises(BundleError, match="is where the weights are that are to be read"):
            planned(source, out, overwrite=overwrite)
    planned(checkpoint, tmp_path / "beside").run()
    assert hashes(store) == hashes(whole)


def test_two_imports_do_not_write_one_folder(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = planned(checkpoint, out)
    out.mkdir()
    folder = os.open(out, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(OutputError, match="another import is writing"):
        one.run()
    assert not list(out.iterdir())
    os.close(folder)
    one.run()
    assert holds_weights(out)


def test_a_source_that_changes_while_it_is_read_makes_no_store(
    checkpoint: Path, tmp_path: Path
) -> None:
    changing = shutil.copytree(checkpoint, tmp_path / "changing")
    path = changing / "ckpt-0" / "tensor00013_000"
    before = path.read_bytes()
    after = bytearray(before)
    after[-100] ^= 1
    begun = planned(changing, tmp_path / "out")

    def change(_done: int) -> None:
        with path.open("r+b") as file:  # at no moment shorter, which another thread would tell
            file.write(after)

    with pytest.raises(CheckpointError, match="was changed while it was read"):
        begun.run(progress=change)
    with pytest.raises(CheckpointError, match="half made"):
        open_weights(tmp_path / "out")
    with pytest.raises(BundleError, match="half-made store of other weights"):
        planned(changing, tmp_path / "out")
    path.write_bytes(before)
    planned(changing, tmp_path / "out").run()
    assert tensors(tmp_path / "out") == tensors(checkpoint)


# What it needs.


def test_it_needs_room_for_what_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = planned(checkpoint, out)
    assert sum(disk.nbytes for disk in before.needs().disk) == sum(
        file.size for file in before.missing
    )
    before.run()
    (out / "layer_00.safetensors").unlink()
    after = planned(checkpoint, out)
    (disk,) = after.needs().disk
    assert disk.nbytes == after.missing[0].size
    replaced = planned(checkpoint, out, overwrite=True)
    (disk,) = replaced.needs().disk
    assert disk.nbytes < sum(file.size for file in replaced.missing) * 0.7


def test_what_is_made_int8_needs_room_for_a_matrix(checkpoint: Path, tmp_path: Path) -> None:
    copied = planned(checkpoint, tmp_path / "out")
    made = dataclasses.replace(copied, source=cast(TensorSource, SimpleNamespace(root=checkpoint)))
    assert made.needs(1).memory - copied.needs(1).memory == 96 * 256
    assert made.needs(3).memory - copied.needs(3).memory == 3 * 96 * 256
    assert made.needs(9) == made.needs(3)  # there are three files
    assert made.needs(1).seconds > copied.needs(1).seconds


def test_holes_need_no_room(checkpoint: Path, tmp_path: Path) -> None:
    sparse = shutil.copytree(checkpoint, tmp_path / "sparse")
    path = sparse / "ckpt-0" / "tensor00002_000"
    content = path.read_bytes()
    with path.open("wb") as file:
        file.write(content[:201])
        file.truncate(len(content) - 8500)
        file.seek(len(content) - 8500)
        file.write(content[-8500:])
    (plain,) = planned(checkpoint, tmp_path / "out").needs().disk
    (less,) = planned(sparse, tmp_path / "out").needs().disk
    assert less.nbytes < plain.nbytes - 100_000


def test_what_is_read_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    damaged = checkpoint_copy("tiny", tmp_path / "tiny")
    (damaged / "ckpt-0" / "tensor00003_000").unlink()
    with pytest.raises(CheckpointError, match="tensor00003_000"):
        planned(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()
