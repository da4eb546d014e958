"""A store's manifest is read back as it was written, or refused in a line."""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.errors import CheckpointError
from export_grok.export.index_source import IndexSource
from export_grok.export.quantisation import QuantisedTensor
from export_grok.export.store.folder import STORE_MANIFEST, write_store
from export_grok.export.store.manifest import SourceFile, StoredTensor, StoreManifest
from export_grok.weights import WeightReader
from tests.conftest import load_golden

PLAN = "0" * 64
ERROR = QuantisedTensor(
    name="layers.0.experts.down",
    values=10,
    scale_min=0.1,
    scale_max=0.2,
    saturated=0.0,
    relative_error=0.01,
    max_error=1.5,
)


class Quantising(IndexSource):
    """A source that says it made the matrices int8 itself."""

    layout = "other"

    def error(self, name: str) -> QuantisedTensor | None:
        return ERROR if name == "layers.0.experts.down.weight" else None


@pytest.fixture(scope="module")
def source() -> Quantising:
    golden = load_golden("tiny")
    return Quantising(golden.config, golden.index)


@pytest.fixture(scope="module")
def store(source: Quantising, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with its manifest; it is shared."""
    out = tmp_path_factory.mktemp("store")
    write_store(source, out, plan=PLAN)
    StoreManifest.of(source, PLAN, out).write(out)
    return out


@pytest.fixture
def value(store: Path) -> dict[str, Any]:
    """Return the manifest as JSON values."""
    values: dict[str, Any] = json.loads((store / STORE_MANIFEST).read_bytes())
    return values


def read(value: Any, folder: Path) -> StoreManifest | None:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    (folder / STORE_MANIFEST).write_bytes(text)
    return StoreManifest.read(folder)


def test_it_says_what_every_tensor_and_source_file_is(source: Quantising, store: Path) -> None:
    manifest = StoreManifest.read(store)
    assert manifest is not None
    index = source.index
    reader = WeightReader(index.root)
    assert (manifest.layout, manifest.plan, manifest.config) == ("other", PLAN, source.config)
    assert list(manifest.tensors) == list(index.weights)
    for name, weight in index.weights.items():
        assert manifest.tensors[name] == StoredTensor(
            file="layer_01.safetensors"
            if name.startswith("layers.1.")
            else "layer_00.safetensors"
            if name.startswith("layers.0.")
            else "embedding.safetensors",
            dtype=weight.dtype,
            shape=weight.shape,
            sha256=hashlib.sha256(reader.read(weight).tobytes()).hexdigest(),
            origins=(weight.file,),
        )
    assert manifest.source == {
        file: SourceFile(
            bytes=length, sha256=hashlib.sha256((index.root / file).read_bytes()).hexdigest()
        )
        for file, length in index.files.items()
    }
    assert manifest.files == {p.name: p.stat().st_size for p in store.glob("*.safetensors")}
    assert manifest.errors == {"layers.0.experts.down.weight": ERROR}


def test_it_is_read_back_as_it_was(source: Quantising, store: Path) -> None:
    assert StoreManifest.read(store) == StoreManifest.of(source, PLAN, store)


def test_a_folder_without_one_has_none(tmp_path: Path) -> None:
    assert StoreManifest.read(tmp_path) is None


def test_files_that_are_not_of_the_plan_have_no_manifest(source: Quantising, store: Path) -> None:
    with pytest.raises(CheckpointError, match="was changed while the store was written"):
        StoreManifest.of(source, "1" * 64, store)


def changes() -> Iterator[tuple[str, Any]]:
    """Yield a path into the manifest, and what must not stand there."""
    tensor = "tensors/final_norm.scale"
    yield "format", "export-grok bundle"
    yield "format_version", 2
    yield "format_version", None
    yield "layout", 1
    yield "plan", None
    yield "config", []
    yield "config/num_layers", 3
    yield "config/num_layers", 10**9
    yield "config/emb_size", 97
    yield "files", {}
    yield "files/layer_00.safetensors", -1
    yield "files/layer_00.safetensors", 1.0
    yield "files/layer_02.safetensors", 1
    yield "tensors", []
    yield "tensors/more", {}
    yield tensor, None
    yield f"{tensor}/file", "../layer_00.safetensors"
    yield f"{tensor}/file", "none.safetensors"
    yield f"{tensor}/file", 1
    yield f"{tensor}/dtype", "int8"
    yield f"{tensor}/dtype", ["float32"]
    yield f"{tensor}/shape", [1]
    yield f"{tensor}/shape", ["96"]
    yield f"{tensor}/shape", 96
    yield f"{tensor}/sha256", "0" * 63
    yield f"{tensor}/sha256", "G" * 64
    yield f"{tensor}/sha256", None
    yield f"{tensor}/origins", "ckpt-0/tensor00001_000"
    yield f"{tensor}/origins", ["none"]
    yield f"{tensor}/origins", [[]]
    yield "source/more", {}
    yield "source/more", []
    yield "source/more", {"bytes": True, "sha256": "0" * 64}
    yield "errors", None
    yield "errors/none", dataclasses.asdict(ERROR)
    yield "errors/final_norm.scale", {}
    yield "errors/final_norm.scale", dataclasses.asdict(ERROR) | {"name": 1}
    yield "errors/final_norm.scale", dataclasses.asdict(ERROR) | {"saturated": "0"}
    yield "errors/final_norm.scale", dataclasses.asdict(ERROR) | {"max_error": float("nan")}
    yield "errors/final_norm.scale", dataclasses.asdict(ERROR) | {"another": 1.0}


@pytest.mark.parametrize(("path", "wrong"), list(changes()))
def test_a_value_that_cannot_be_is_refused(
    path: str, wrong: Any, value: dict[str, Any], tmp_path: Path
) -> None:
    *parents, last = path.split("/")
    place = value
    for key in parents:
        place = place[key]
    place[last] = wrong
    with pytest.raises(CheckpointError, match=r"store\.json .*import the weights again"):
        read(value, tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_object_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"store\.json .*import the weights again"):
        read(text, tmp_path)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container below `value`, with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


@settings(max_examples=150, deadline=None)
@given(
    where=st.integers(0, 10**6),
    wrong=st.one_of(
        st.none(), st.booleans(), st.integers(-1, 3), st.floats(), st.text(max_size=3),
        st.just([]), st.just({}), st.just("remove"),
    ),
)  # fmt: skip
def test_any_change_is_refused_in_our_words_or_changes_a_fact(
    where: int, wrong: Any, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    value = json.loads((store / STORE_MANIFEST).read_bytes())
    before = copy.deepcopy(value)
    found = list(places(value))
    container, key = found[where % len(found)]
    if wrong == "remove":
        del container[key]
    else:
        container[key] = wrong
    folder = tmp_path_factory.getbasetemp()
    try:
        manifest = read(value, folder)
    except CheckpointError:
        return
    finally:
        (folder / STORE_MANIFEST).unlink()
    assert manifest is not None
    # What a config leaves out has a default.
    assert manifest != StoreManifest.read(store) or value == before or wrong == "remove"
