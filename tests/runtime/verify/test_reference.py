"""What an engine is held to is what was meant, of the same model, or is refused with its value."""

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import WEIGHT_INDEX, Bundle
from export_grok.config import GrokConfig
from export_grok.engines.ort.probe import OrtProbe
from export_grok.engines.probe import GraphName, Probe
from export_grok.errors import BundleError, ConfigError, MissingDependencyError, RequestError
from export_grok.manifest import HeadError
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.goldens import Goldens
from export_grok.runtime.verify.reference import reference_of
from tests.conftest import DATA, load_golden
from tests.runtime.verify.bundles import bundle_with

GOLDEN = load_golden("tiny")
INT8: dict[str, Any] = {"head": "int8", "head_error": HeadError(relative=0.01, largest=0.02)}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return bundle_with("tiny", tmp_path / "bundle")


def embedded(probe: Probe) -> NDArray[np.float32]:
    """Return what the embedding gives for the goldens' tokens."""
    with probe.graph(GraphName(kind="embedding")) as run:
        return run({"tokens": GOLDEN.arrays["tokens"]})["h"]


# ---- each kind


def test_torch_is_the_model_on_the_weights_of_the_bundle(bundle: Bundle) -> None:
    reference = reference_of("torch", bundle)
    assert isinstance(reference.probe, TorchProbe)
    assert reference.probe.dtype == "float32"
    assert reference.probe.config == bundle.config
    original = GOLDEN.arrays["f32/hidden"][:, 0]
    assert np.allclose(embedded(reference.probe), original, rtol=1e-5, atol=1e-7)
    assert (reference.bundle, reference.goldens, reference.notes) == (None, None, ())


def test_of_a_bfloat16_engine_the_reference_is_float32(tmp_path: Path) -> None:
    narrow = bundle_with("tiny", tmp_path / "bundle", dtype="bfloat16")
    assert reference_of("torch", narrow).probe.dtype == "float32"


def test_ort_is_the_bundle_by_function_bodies(bundle: Bundle) -> None:
    reference = reference_of("ort", bundle, threads=1)
    assert isinstance(reference.probe, OrtProbe)
    assert "function bodies" in reference.probe.name
    assert reference.bundle is None


@pytest.mark.parametrize("by", ["name", "path"])
def test_goldens_are_those_beside_the_weights_or_of_the_path(by: str, bundle: Bundle) -> None:
    path = str(DATA / "tiny" / "goldens.npz") if by == "path" else "goldens"
    reference = reference_of(path, bundle)
    assert isinstance(reference.probe, Goldens)
    assert reference.goldens is reference.probe
    assert np.array_equal(reference.probe.arrays["hidden"], GOLDEN.arrays["f32/hidden"])
    assert reference.notes == ("the original's results show the inside of prefill only",)


def test_the_path_of_a_bundle_is_its_engine(bundle: Bundle, tmp_path: Path) -> None:
    other = bundle_with("tiny", tmp_path / "other")
    reference = reference_of(str(other.folder), bundle, threads=1)
    assert isinstance(reference.probe, OrtProbe)
    assert "function bodies" not in reference.probe.name
    assert reference.bundle is not None
    assert reference.bundle.folder == other.folder
    assert reference.notes == ()


def test_the_path_of_a_checkpoint_is_the_model_on_its_weights(bundle: Bundle) -> None:
    reference = reference_of(str(DATA / "tiny"), bundle)
    assert isinstance(reference.probe, TorchProbe)
    assert np.array_equal(embedded(reference.probe), embedded(reference_of("torch", bundle).probe))
    assert (reference.bundle, reference.notes) == (None, ())


def test_a_bundle_may_hold_the_first_layers_of_a_checkpoint(tmp_path: Path) -> None:
    config = dataclasses.replace(load_golden("tiny8").config, num_layers=2)
    bundle = bundle_with("tiny8", tmp_path / "bundle", config=config)
    assert reference_of(str(DATA / "tiny8"), bundle).probe.config == config


# ---- notes


def test_an_int8_head_of_the_bundle_is_that_of_its_model_and_noted_beside_another(
    tmp_path: Path,
) -> None:
    bundle = bundle_with("tiny", tmp_path / "bundle", **INT8)
    (bundle.folder / "head.weights").write_bytes(b"")
    model = reference_of("torch", bundle)
    assert isinstance(model.probe, TorchProbe)
    assert model.probe.head is not model.probe.index
    assert model.notes == ()
    (note,) = reference_of(str(DATA / "tiny"), bundle).notes
    assert note.startswith(f"the head of {bundle.folder} is int8, that of {DATA / 'tiny'} is not")
    plain = bundle_with("tiny", tmp_path / "plain")
    (note,) = reference_of(str(plain.folder), bundle).notes
    assert note.startswith(f"the head of {plain.folder} is float32, that of {bundle.folder} int8")


def test_bundles_of_other_weights_are_compared_with_a_note(bundle: Bundle, tmp_path: Path) -> None:
    source = bundle.manifest.source
    same = bundle_with("tiny", tmp_path / "same", source=source)
    assert reference_of(str(same.folder), bundle).notes == ()
    name = "ckpt-0/tensor00001_000"
    other = bundle_with("tiny", tmp_path / "other", source={**source, name: "changed"})
    (note,) = reference_of(str(other.folder), bundle).notes
    assert note == f"the bundles were made of different weights: 1 files differ, among them {name}"


# ---- refused

CHANGES: dict[str, Any] = {
    "num_layers": 3,
    "num_experts": 4,
    "rope_base": 500.0,
    "attn_logit_cap": 20.0,
}


@pytest.mark.parametrize("names", [*([name] for name in CHANGES), [*CHANGES]])
def test_a_bundle_of_another_model_is_refused_with_all_that_differs(
    names: list[str], bundle: Bundle, tmp_path: Path
) -> None:
    config: GrokConfig = dataclasses.replace(
        bundle.config, **{name: CHANGES[name] for name in names}
    )
    other = bundle_with("tiny", tmp_path / "other", config=config)
    with pytest.raises(ConfigError) as caught:
        reference_of(str(other.folder), bundle)
    told = str(caught.value)
    assert told.startswith(f"{other.folder} is of another model: ")
    for name in CHANGES:
        words = f"{name} is {CHANGES[name]}, of the bundle {getattr(bundle.config, name)}"
        assert (words in told) is (name in names)


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(bundle: Bundle) -> None:
    path = DATA / "tiny8"
    with pytest.raises(ConfigError, match=rf"{path} is of another model: .*emb_size is 128, of t"):
        reference_of(str(path), bundle)


def test_a_checkpoint_of_fewer_layers_is_of_another_model(tmp_path: Path) -> None:
    config = dataclasses.replace(load_golden("tiny").config, num_layers=3)
    bundle = bundle_with("tiny", tmp_path / "bundle", config=config)
    with pytest.raises(ConfigError, match="num_layers is 2, of the bundle 3"):
        reference_of(str(DATA / "tiny"), bundle)


def test_goldens_of_another_model_are_refused(bundle: Bundle) -> None:
    with pytest.raises(RequestError, match="of another model: the shape of its"):
        reference_of(str(DATA / "tiny8" / "goldens.npz"), bundle)


def test_without_goldens_beside_the_weights_their_place_is_told(
    bundle: Bundle, tmp_path: Path
) -> None:
    moved = dataclasses.replace(bundle, weights_root=tmp_path)
    with pytest.raises(RequestError, match=rf"{tmp_path}/goldens.npz is missing"):
        reference_of("goldens", moved)


@pytest.mark.parametrize("against", ["tourch", "TORCH", "/no/such/place", ""])
def test_what_is_no_reference_is_refused_with_all_that_are(against: str, bundle: Bundle) -> None:
    with pytest.raises(ConfigError) as caught:
        reference_of(against, bundle)
    told = str(caught.value)
    assert told.startswith(f"--against {against}: there is no such reference. Take torch, ort, ")
    assert all(word in told for word in ("goldens", "bundle", "checkpoint", "goldens.npz"))


def test_a_folder_that_is_neither_bundle_nor_checkpoint_is_no_reference(
    bundle: Bundle, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="there is no such reference"):
        reference_of(str(tmp_path / "empty"), bundle)


def test_a_damaged_bundle_and_one_without_an_engine_are_refused(
    bundle: Bundle, tmp_path: Path
) -> None:
    damaged = bundle_with("tiny", tmp_path / "damaged")
    (damaged.folder / WEIGHT_INDEX).write_text("{}")
    with pytest.raises(BundleError, match=WEIGHT_INDEX):
        reference_of(str(damaged.folder), bundle)
    graphs = bundle_with("tiny", tmp_path / "graphs", kind="graphs", backend=None)
    with pytest.raises(BundleError, match="holds graphs and no engine; build one"):
        reference_of(str(graphs.folder), bundle)


@pytest.mark.parametrize("against", ["torch", str(DATA / "tiny")])
def test_without_torch_the_extra_is_told(
    against: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "export-grok\[verify\]"'):
        reference_of(against, bundle)


def test_a_checkpoint_without_its_weights_is_no_reference(bundle: Bundle, tmp_path: Path) -> None:
    shutil.copy(DATA / "tiny" / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="there is no such reference"):
        reference_of(str(tmp_path), bundle)
