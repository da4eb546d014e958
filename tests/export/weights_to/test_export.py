"""The folder of an export: whole files are kept, what is another's is not touched."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from export_grok.errors import CheckpointError, ConfigError, OutputError
from export_grok.export.index_source import IndexSource
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.export.store.folder import write_store
from export_grok.export.weights_to.export import WeightsExport, plan_export
from export_grok.export.weights_to.options import Format, WeightsOptions
from export_grok.export.weights_to.plan import PlannedFile
from tests.bundles import BundleOf, bundle_of, hashes
from tests.export.weights_to.conftest import CONFIG
from tests.export.weights_to.expected import Model

__all__ = ["bundle_of"]

HF, GGUF = WeightsOptions(to="hf"), WeightsOptions(to="gguf", split=True)
Planned = Callable[..., WeightsExport]


@pytest.fixture
def planned(checkpoint: Path, tmp_path: Path) -> Planned:
    """Return what plans an export of the random model."""

    def planned(
        options: WeightsOptions = HF, out: str = "out", *, overwrite: bool = False
    ) -> WeightsExport:
        return plan_export(checkpoint, tmp_path / out, options, overwrite=overwrite)

    return planned


def broken_off(plan: WeightsExport, files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write so many files, and half of the next."""
    write, count = PlannedFile.write, iter(range(files))

    def stop(file: PlannedFile, path: Path, progress: Callable[[int], None]) -> None:
        if next(count, None) is None:
            (path.parent / f".{path.name}.partial").write_bytes(file.header)
            raise KeyboardInterrupt
        write(file, path, progress)

    with monkeypatch.context() as patch:
        patch.setattr(PlannedFile, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            plan.folder.write()


@pytest.mark.parametrize("options", [HF, GGUF])
@pytest.mark.parametrize("files", [0, 5, 12])
def test_broken_off_it_goes_on_and_the_result_is_the_same(
    options: WeightsOptions,
    files: int,
    planned: Planned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned(options, "whole").folder.write()
    broken_off(planned(options), files, monkeypatch)
    there = {path.name for path in (tmp_path / "out").glob("m*")}
    # What a reader begins with is not there yet.
    assert there.isdisjoint({"model.safetensors.index.json", "model-00001-of-00013.gguf"})
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in there}
    plan = planned(options)
    assert plan.folder.kept == there
    assert plan.needs.disk[0].nbytes == sum(
        file.nbytes for file in plan.folder.files if file.name not in there
    )
    plan.folder.write()
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in there} == times
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_a_second_run_writes_nothing(planned: Planned, tmp_path: Path) -> None:
    planned().folder.write()
    plan = planned()
    assert plan.needs.disk[0].nbytes == 0
    before = (tmp_path / "out" / "config.json").stat()
    plan.folder.write()
    assert (tmp_path / "out" / "config.json").stat() == before


@pytest.mark.parametrize("damage", ["cut", "header"])
def test_a_file_that_is_not_whole_is_not_kept(
    damage: str, planned: Planned, tmp_path: Path
) -> None:
    planned().folder.write()
    path = tmp_path / "out" / "model-00003-of-00013.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] if damage == "cut" else data.replace(b"layers", b"loyers", 1))
    with pytest.raises(OutputError, match=r"model-00003-of-00013\.safetensors of another export"):
        planned()
    planned(overwrite=True).folder.write()
    assert path.read_bytes() == data


def test_the_weights_of_another_model_are_not_mixed_in(planned: Planned, tmp_path: Path) -> None:
    planned().folder.write()
    before = hashes(tmp_path / "out")
    write_random_checkpoint(CONFIG, tmp_path / "other", seed=1)
    with pytest.raises(OutputError, match="of another export"):
        plan_export(tmp_path / "other", tmp_path / "out", HF)
    assert hashes(tmp_path / "out") == before
    plan = plan_export(tmp_path / "other", tmp_path / "out", HF, overwrite=True)
    assert plan.folder.kept == {"config.json", "model.safetensors.index.json"}
    plan.folder.write()
    plan_export(tmp_path / "other", tmp_path / "new", HF).folder.write()
    assert hashes(tmp_path / "out") == hashes(tmp_path / "new")


def test_overwriting_leaves_no_file_of_the_other_export(planned: Planned, tmp_path: Path) -> None:
    planned(HF).folder.write()
    planned(GGUF, overwrite=True).folder.write()
    planned(GGUF, "new").folder.write()
    assert hashes(tmp_path / "out") == hashes(tmp_path / "new")


def test_a_folder_with_anything_else_is_refused(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"thesis\.tex.*choose another --out"):
            planned(overwrite=overwrite)


def test_the_checkpoint_itself_is_not_overwritten(checkpoint: Path) -> None:
    before = hashes(checkpoint)
    for folder in (checkpoint, checkpoint / "ckpt-0"):
        with pytest.raises(OutputError, match="choose another --out"):
            plan_export(checkpoint, folder, HF, overwrite=True)
    assert hashes(checkpoint) == before


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_a_store_and_a_release_give_the_same_tensors(
    to: Format, model: Model, tmp_path: Path
) -> None:
    config, index = model
    write_store(IndexSource(config, index), tmp_path / "store")
    released = plan_export(index.root, tmp_path / "released", WeightsOptions(to=to))
    stored = plan_export(tmp_path / "store", tmp_path / "stored", WeightsOptions(to=to))
    for ours, theirs in zip(released.folder.files, stored.folder.files, strict=True):
        assert ours.name == theirs.name
        for a, b in zip(ours.tensors, theirs.tensors, strict=True):
            assert [x.tobytes() for x in a.blocks()] == [x.tobytes() for x in b.blocks()]


def test_a_bundle_has_weights_too(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundle = bundle_of("tiny")
    of_bundle = plan_export(bundle.folder, tmp_path / "a", HF, layers=1)
    of_checkpoint = plan_export(bundle.weights_root, tmp_path / "b", HF, layers=1)
    of_bundle.folder.write()
    of_checkpoint.folder.write()
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    with pytest.raises(ConfigError, match="leave --config away"):
        plan_export(bundle.folder, tmp_path / "c", HF, config=bundle.config)


def test_only_the_first_layers_are_needed_for_them(checkpoint: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(checkpoint, part)
    # Of 12 layers 0, 1, 10, 11, 2, ... in the order of the files the last is 9.
    for number in range(2 + 11 * 12, 2 + 12 * 12):
        os.remove(part / "ckpt-0" / f"tensor{number:05}_000")
    with pytest.raises(CheckpointError):
        plan_export(part, tmp_path / "out", HF)
    plan = plan_export(part, tmp_path / "out", HF, layers=9)
    assert [file.name for file in plan.folder.files][8] == "model-00009-of-00010.safetensors"


def test_one_file_longer_than_the_limit_is_split(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = WeightsOptions(to="gguf")
    (file,) = planned(whole).folder.files
    assert file.name == "model.gguf"
    monkeypatch.setattr("export_grok.export.weights_to.export.LONGEST_FILE", file.nbytes - 1)
    assert len(planned(whole).folder.files) == 13
    assert len(planned(WeightsOptions(to="gguf", split=False)).folder.files) == 1


def test_options_that_contradict_each_other_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        WeightsOptions(to="hf", dtype="int8", head="int8", split=True)
    assert all(word in str(caught.value) for word in ("bfloat16", "--head", "--split"))
    with pytest.raises(ConfigError, match="leave --names away"):
        WeightsOptions(to="gguf", names="hpcai")
    with pytest.raises(ConfigError, match=r"dtype is 'int4'; use int8"):
        WeightsOptions(to="gguf", dtype="int4")  # type: ignore[arg-type]
