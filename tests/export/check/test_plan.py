"""Files, stores and bundles are held to all that is known of them, in one reading."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from export_grok.artifacts import COPIED_WEIGHTS, WEIGHT_INDEX, record_of, write_manifest
from export_grok.errors import BundleError, CheckpointError, ConfigError
from export_grok.export.check.hash_list import HashList
from export_grok.export.check.plan import check_plan
from export_grok.export.check.soundness import Soundness, soundness_of
from export_grok.export.checkpoint import open_weights, released_files
from export_grok.export.head import head_error, write_head
from export_grok.export.index_source import IndexSource
from export_grok.export.parameters import Parameter
from export_grok.export.rank_weights import write_ranks
from export_grok.export.released_layout import write_released
from export_grok.export.store.folder import write_store
from export_grok.export.store.importing import planned_import
from export_grok.files import write_json
from export_grok.manifest import Manifest, WeightsPlace
from export_grok.weights import WeightIndex
from tests.damaged_weights import CONFIG, checked, checkpoint, place_of, values_in, whole

__all__ = ["checkpoint", "whole"]

FILES = 2 + 12 * CONFIG.num_layers
TENSORS = 2 + 19 * CONFIG.num_layers
GATE = "layers.1.experts.gate.weight"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def texts(found: Soundness) -> str:
    return "\n".join(map(str, found.findings))


# ---- headers and reading


def test_headers_and_values_are_told_in_one_run(checkpoint: Path) -> None:
    folder = checkpoint / "ckpt-0"
    (folder / "tensor00003_000").unlink()
    os.truncate(folder / "tensor00005_000", 1000)
    os.truncate(folder / "tensor00008_000", 0)
    (folder / "tensor00009_000").write_bytes(b"\x80\x04cos\nsystem\n.")
    (folder / "tensor00099_000").write_bytes(b"")
    shutil.copy(folder / "tensor00010_000", folder / "tensor00013_000")
    # tensor00002_000 of layer 0 is whole, but what it holds is not.
    flat = place_of(checkpoint, "layers.0.experts.gate.weight")
    with (checkpoint / flat.file).open("r+b") as file:
        file.seek(flat.offset)
        file.write(bytes(flat.nbytes // CONFIG.num_experts))
    found = checked(checkpoint)
    for name in ("00003", "00005", "00008", "00009", "00099", "00013"):
        assert f"tensor{name}_000" in texts(found)
    assert "'os.system'" in texts(found)
    assert "tensor00002_000 layers.0.experts.gate.weight: [0] of 3 is all zeros" in texts(found)
    assert len(found.findings) == 7
    assert found.files == FILES - 4  # and those were read that could be


def test_another_config_is_told_as_such(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_bytes())
    write_json(checkpoint / "config.json", config | {"emb_size": 64})
    found = checked(checkpoint)
    assert "files hold other shapes than" in str(found.findings[0])
    assert len(found.at("wrong")) > FILES
    # The values of what is there are read nevertheless, without a stumble.
    assert found.tensors == TENSORS


def test_a_tensor_of_nothing_is_told_by_its_shape(checkpoint: Path) -> None:
    file = place_of(checkpoint, "layers.0.router.weight").file
    nothing = Parameter(name="array", dtype="float32", shape=(0, CONFIG.num_experts))
    write_released(checkpoint / file, {"array": nothing}, None)
    (finding,) = checked(checkpoint).findings
    assert "layers.0.router.weight has shape (0, 3)" in str(finding)


def test_the_first_layers_are_checked_alone(checkpoint: Path) -> None:
    values_in(checkpoint, GATE)[...] = 0
    found = checked(checkpoint, layers=1)
    assert found.findings == ()
    assert (found.files, found.layers) == (FILES - 12, 1)
    (checkpoint / "config.json").unlink()
    assert checked(checkpoint, layers=1, config=CONFIG).sound
    with pytest.raises(ConfigError, match="3 layers were asked for"):
        checked(checkpoint, layers=3, config=CONFIG)


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        check_plan(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_plan(tmp_path / "none")


def test_a_disk_that_fails_in_the_middle_is_told_and_the_rest_is_read(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = os.stat(whole / place_of(whole, GATE).file).st_ino
    plain = os.preadv

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(file).st_ino == broken and offset > 1000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        # A signal, or the system, may cut any read short.
        return plain(file, [buffers[0][:5000]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    found = checked(whole)
    file = place_of(whole, GATE).file
    scales = place_of(whole, GATE.replace("weight", "scales")).offset
    assert list(map(str, found.findings)) == [
        f"{file} {GATE}: cannot be read from byte 5,200 on: Input/output error",
        f"{file} {GATE.replace('weight', 'scales')}: cannot be read from byte {scales:,} on: "
        "Input/output error",
    ]
    assert not found.sound


def test_a_file_that_is_cut_or_removed_meanwhile_is_told(checkpoint: Path) -> None:
    plan = check_plan(checkpoint)
    weight = place_of(checkpoint, GATE)
    os.truncate(checkpoint / weight.file, 50_000)
    (checkpoint / "ckpt-0" / "tensor00001_000").unlink()
    found = soundness_of(plan, workers=2)
    assert [finding.tensor for finding in found.findings] == [
        "",
        GATE,
        GATE.replace("weight", "scales"),
    ]
    assert "tensor00001_000: cannot be read: No such file" in texts(found)
    assert f"{GATE}: is not there from byte 50,000 on: the file ends" in texts(found)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, num_layers=1, ffn_size=1 << 18)
    (tmp_path / "ckpt-0").mkdir()
    write_json(tmp_path / "config.json", config.to_dict())
    for name, parameters in released_files(config).items():
        write_released(tmp_path / "ckpt-0" / name, parameters, None)
    plan = check_plan(tmp_path)
    assert plan.nbytes > 300e6
    tracemalloc.start()
    try:
        found = soundness_of(plan, workers=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 3 * (8 << 20)
    assert peak < plan.needs(workers=2).memory
    # Sparse files are zeros: each tensor is told once, and nothing more of it.
    assert {finding.tensor for finding in found.findings} == set(open_weights(tmp_path)[1].weights)
    assert len(found.findings) == found.tensors
    assert {finding.text for finding in found.findings} == {"is all zeros"}


# ---- hashes of a list


def sha256sum(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("ckpt-0/*"))
    }


def listed(hashes: dict[str, str]) -> HashList:
    return HashList(source=Path("SHA256SUMS"), hashes=hashes)


def test_whole_files_are_held_to_a_list(checkpoint: Path) -> None:
    hashes = sha256sum(checkpoint)
    found = checked(checkpoint, hashes=listed(hashes))
    assert (found.findings, found.hashes) == ((), FILES)
    weight = place_of(checkpoint, GATE)
    # In the values, in the pickle around them, and in what is small.
    for file, offset in (
        (weight.file, weight.offset + 77_777),
        ("ckpt-0/tensor00001_000", 2),
        ("ckpt-0/tensor00000_000", 120_000),
    ):
        flip(checkpoint / file, offset)
    found = checked(checkpoint, hashes=listed(hashes))
    wrong = {finding.file for finding in found.findings if finding.kind == "hash"}
    assert wrong == {weight.file, "ckpt-0/tensor00000_000", "ckpt-0/tensor00001_000"}
    assert found.hashes == FILES - 3
    assert not found.sound


def test_names_alone_and_other_places_will_do(checkpoint: Path) -> None:
    hashes = sha256sum(checkpoint)
    names = {Path(file).name: sha256 for file, sha256 in hashes.items()}
    away = {f"/data/grok-1/{file}": sha256 for file, sha256 in hashes.items()}
    for folder in (checkpoint, checkpoint / "ckpt-0"):
        for form in (hashes, names, away):
            found = checked(folder, hashes=listed(form), config=CONFIG)
            assert (found.findings, found.hashes) == ((), FILES)


def test_what_only_the_list_or_only_the_folder_has_is_told(checkpoint: Path) -> None:
    hashes = sha256sum(checkpoint)
    del hashes["ckpt-0/tensor00007_000"]
    (checkpoint / "tokenizer.model").write_bytes(b"pieces")
    hashes["tokenizer.model"] = hashlib.sha256(b"pieces").hexdigest()
    hashes["README.md"] = hashlib.sha256(b"").hexdigest()
    found = checked(checkpoint, hashes=listed(hashes))
    assert [str(finding) for finding in found.findings] == [
        "ckpt-0/tensor00007_000: is not in SHA256SUMS",
        f"README.md is in SHA256SUMS and not in {checkpoint}",
    ]
    assert found.sound
    assert found.hashes == FILES
    (checkpoint / "tokenizer.model").write_bytes(b"others")
    found = checked(checkpoint, hashes=listed(hashes))
    assert [finding.file for finding in found.at("wrong")] == ["tokenizer.model"]


def test_a_file_that_no_header_explains_is_held_to_its_hash_all_the_same(
    checkpoint: Path,
) -> None:
    hashes = sha256sum(checkpoint)
    os.truncate(checkpoint / "ckpt-0" / "tensor00005_000", 1000)
    (checkpoint / "ckpt-0" / "tensor00006_000").unlink()
    found = checked(checkpoint, hashes=listed(hashes))
    assert [finding.kind for finding in found.findings] == ["file", "file", "hash"]
    assert found.findings[2].file == "ckpt-0/tensor00005_000"


def test_layers_that_are_left_out_are_not_asked_for(checkpoint: Path) -> None:
    found = checked(checkpoint, hashes=listed(sha256sum(checkpoint)), layers=1)
    assert (found.findings, found.hashes) == ((), FILES - 12)


def test_a_list_of_something_else_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"SHA256SUMS names no file of .*, but e\.g\. other"):
        checked(checkpoint, hashes=listed({"other": "0" * 64}))


def test_nothing_outside_of_the_folder_is_read(checkpoint: Path) -> None:
    (checkpoint.parent / "secret").write_bytes(b"")
    hashes = sha256sum(checkpoint)
    for name in ("../secret", str(checkpoint.parent / "secret"), "ckpt-0/../../secret"):
        hashes[name] = "0" * 64
    found = checked(checkpoint, hashes=listed(hashes))
    assert found.files == FILES
    assert len(found.at("doubtful")) == 3


# ---- stores


@pytest.fixture
def store(checkpoint: Path, tmp_path: Path) -> Path:
    planned_import(IndexSource(*open_weights(checkpoint)), tmp_path / "store").run()
    return tmp_path / "store"


def test_every_tensor_of_a_store_is_held_to_its_hash(store: Path) -> None:
    found = checked(store)
    assert (found.findings, found.hashes, found.kind) == ((), TENSORS, "store")


@pytest.mark.parametrize("manifest", [True, False])
def test_one_flipped_bit_in_a_store_is_found_by_the_hash_and_not_by_values(
    manifest: bool, store: Path
) -> None:
    if not manifest:  # as in a bundle
        (store / "store.json").unlink()
    weight = place_of(store, GATE)
    flip(store / weight.file, weight.offset + weight.nbytes // 2 + 13)
    found = checked(store)
    (finding,) = found.findings
    assert (finding.kind, finding.tensor, finding.file) == ("hash", GATE, weight.file)
    assert found.hashes == TENSORS - 1


def test_a_store_and_its_manifest_must_agree(store: Path) -> None:
    manifest = json.loads((store / "store.json").read_bytes())
    right = manifest["tensors"][GATE]["sha256"]
    manifest["tensors"][GATE]["sha256"] = "0" * 64
    write_json(store / "store.json", manifest)
    manifest["tensors"][GATE]["sha256"] = right
    found = checked(store)
    assert {finding.tensor for finding in found.findings} == {GATE}
    assert "has another hash in store.json than in its file" in texts(found)
    write_json(store / "store.json", manifest)  # whole again
    header = store / place_of(store, GATE).file
    header.write_bytes(header.read_bytes().replace(right.encode(), b"0" * 64, 1))
    found = checked(store)
    # The bytes are those that the manifest names.
    assert "has another hash in store.json than in its file" in texts(found)
    assert (len(found.findings), found.hashes) == (1, TENSORS)
    header.write_bytes(header.read_bytes().replace(b"0" * 64, right.encode(), 1))
    write_json(store / "store.json", {"format": "?"})
    found = checked(store)
    assert "is not of a store of export-grok" in texts(found)
    assert found.hashes == TENSORS


def test_the_source_is_held_to_the_hashes_that_a_store_has_of_it(
    store: Path, checkpoint: Path
) -> None:
    hashes = HashList.read(store / "store.json")
    found = checked(checkpoint, hashes=hashes)
    assert (found.findings, found.hashes) == ((), FILES)
    flip(checkpoint / "ckpt-0" / "tensor00002_000", 70_000)
    found = checked(checkpoint, hashes=hashes)
    assert [finding.file for finding in found.findings] == ["ckpt-0/tensor00002_000"]


# ---- bundles


def make_bundle(checkpoint: Path, out: Path, *, copied: bool) -> Path:
    """Write a bundle of two ranks with an int8 head, but for its graphs."""
    out.mkdir()
    config, index = open_weights(checkpoint)
    if copied:
        inner = write_store(IndexSource(config, index), out / COPIED_WEIGHTS)
        index = WeightIndex(
            root=out,
            weights={
                weight.name: dataclasses.replace(weight, file=f"{COPIED_WEIGHTS}/{weight.file}")
                for weight in inner
            },
            files={f"{COPIED_WEIGHTS}/{file}": length for file, length in inner.files.items()},
        )
    index.write(out / WEIGHT_INDEX)
    head = write_head(config, index, out)
    names = [WEIGHT_INDEX, *head.files, *write_ranks(config, index, head, out, 2)]
    (out / "layer_00.onnx").write_bytes(b"graph")
    relative = "." if copied else os.path.relpath(checkpoint, out)
    write_manifest(
        out,
        Manifest(
            kind="engine",
            backend="ort",
            config=config,
            dtype="float32",
            head="int8",
            head_error=head_error(index, head),
            weights=WeightsPlace(
                copied=copied, relative=relative, absolute="" if copied else str(checkpoint)
            ),
            source={},
            versions={},
            files={name: record_of(out / name) for name in [*names, "layer_00.onnx"]},
            weight_files={file: record_of(index.root / file) for file in index.files},
            ports={},
            lowering={},
        ),
    )
    return out


@pytest.mark.parametrize("copied", [True, False])
def test_a_bundle_is_checked_with_the_weights_it_has_or_points_at(
    copied: bool, checkpoint: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(checkpoint, tmp_path / "bundle", copied=copied)
    found = checked(bundle)
    # Whole matrices and parts of them are no equals.
    assert found.findings == ()
    assert found.kind == "bundle"
    assert found.hashes == (TENSORS if copied else 0)
    files = 1 + CONFIG.num_layers
    assert found.files == (files if copied else FILES) + 1 + 2 * files


def test_damage_in_every_part_of_a_bundle_is_told(checkpoint: Path, tmp_path: Path) -> None:
    bundle = make_bundle(checkpoint, tmp_path / "bundle", copied=True)
    (bundle / "layer_00.onnx").write_bytes(b"other")
    for name in ("head.weights", "rank_1/layer_00.weights"):
        length = (bundle / name).stat().st_size
        with (bundle / name).open("r+b") as file:
            file.write(bytes(min(length, 2 * CONFIG.emb_size * CONFIG.vocab_size)))
    flip(bundle / COPIED_WEIGHTS / "embedding.safetensors", 100_000)
    found = checked(bundle)
    # By the manifest, and by what lies in the files.
    for name in ("head.weights", "rank_1/layer_00.weights", "embedding.safetensors"):
        assert f"{name} has changed since the bundle was made" in texts(found)
    assert "layer_00.onnx has changed since the bundle was made" in texts(found)
    told = {(finding.kind, finding.file) for finding in found.findings}
    assert ("hash", "weights/embedding.safetensors") in told
    assert ("zeros", "head.weights") in told
    assert ("zeros", "rank_1/layer_00.weights") in told
    assert "rank_0" not in texts(found)


def test_a_bundle_whose_weights_went_away_is_told_and_they_can_be_given(
    checkpoint: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(checkpoint, tmp_path / "bundle", copied=False)
    checkpoint.rename(tmp_path / "moved")
    found = checked(bundle)
    assert len(found.at("wrong")) == 2 * FILES + 1  # each by the manifest, and when it is read
    assert "say where to with --weights-root" in texts(found)
    assert checked(bundle, weights_root=tmp_path / "moved").findings == ()


def test_damaged_indices_of_a_bundle_are_told_and_the_rest_is_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(checkpoint, tmp_path / "bundle", copied=True)
    (bundle / WEIGHT_INDEX).write_text("{")
    (bundle / "rank_0" / WEIGHT_INDEX).write_text("{}")
    found = checked(bundle)
    assert {finding.kind for finding in found.findings} == {"file"}
    assert found.files == 1 + 1 + CONFIG.num_layers
    (bundle / "manifest.json").write_text("{}")
    with pytest.raises(BundleError, match="is not a manifest of export-grok"):
        checked(bundle)


def test_options_that_do_not_go_with_the_folder_are_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(checkpoint, tmp_path / "bundle", copied=False)
    for options in ({"layers": 1}, {"config": CONFIG}):
        with pytest.raises(ConfigError, match="leave --config and --layers away"):
            check_plan(bundle, **options)
    with pytest.raises(ConfigError, match="leave --weights-root away"):
        check_plan(checkpoint, weights_root=tmp_path)
