"""A store's file says in its header what it was made from, and only the right one is kept."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.export.parameters import Parameter, layer_parameters
from export_grok.export.safetensors_header import read_store_header
from export_grok.export.store.file import ERROR_BYTES, Facts, StoreFile
from tests.conftest import load_golden

CONFIG = load_golden("tiny").config
FILE = StoreFile(
    name="layer_00.safetensors",
    parameters=layer_parameters(CONFIG, 0),
    config=CONFIG,
    plan="f" * 64,
    source={"ckpt-0/tensor00002_000": 1_234, 'odd "name" é.bin': 5},
)
NAMES = list(FILE.parameters)
FACTS = Facts(
    tensors={name: f"{number:064x}" for number, name in enumerate(NAMES)},
    source={path: f"{number:064x}" for number, path in enumerate(FILE.source, start=100)},
    errors={"layers.0.experts.gate.weight": json.dumps({"name": "x", "relative_error": 0.1})},
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return a file with the header of FACTS."""
    path = tmp_path / FILE.name
    path.write_bytes(FILE.header(FACTS) + bytes(FILE.nbytes))
    return path


def test_what_is_written_is_read_back(written: Path) -> None:
    assert FILE.facts_in(written) == FACTS
    assert written.stat().st_size == FILE.size
    assert read_store_header(written) == {
        name: dataclasses.replace(weight, groups=None) for name, weight in FILE.weights.items()
    }


def test_the_safetensors_package_reads_it(written: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(written, framework="np") as opened:
        texts = opened.metadata()
        assert set(opened.keys()) == set(NAMES)
    assert texts["format"] == "export-grok store"
    assert json.loads(texts["config"]) == CONFIG.to_dict()
    assert texts["plan"] == FILE.plan
    assert texts[f"sha256:{NAMES[3]}"] == f"{3:064x}"
    assert texts["source:ckpt-0/tensor00002_000"] == f"1234 {100:064x}"


def test_the_header_is_as_long_whatever_it_says() -> None:
    int8 = [name for name, parameter in FILE.parameters.items() if parameter.dtype == "int8"]
    longest = dataclasses.replace(FACTS, errors=dict.fromkeys(int8, "x" * ERROR_BYTES))
    shortest = dataclasses.replace(FACTS, errors={})
    assert len(FILE.header(longest)) == len(FILE.header(shortest)) == FILE.start
    assert FILE.start % 4096 == 0
    with pytest.raises(ValueError, match="more than planned"):
        FILE.header(dataclasses.replace(FACTS, errors=dict.fromkeys(int8, "x" * 4096)))


def other_files() -> dict[str, StoreFile]:
    """Return files that differ from FILE in one thing each."""
    parameters = dict(FILE.parameters)
    name = "layers.0.router.weight"
    other = Parameter(name=name, dtype="float32", shape=(8, 96))
    return {
        "plan": dataclasses.replace(FILE, plan="e" * 64),
        "config": dataclasses.replace(FILE, config=dataclasses.replace(CONFIG, rope_base=2.0)),
        "length of a source": dataclasses.replace(
            FILE, source={**FILE.source, "ckpt-0/tensor00002_000": 1_235}
        ),
        "fewer sources": dataclasses.replace(FILE, source={"ckpt-0/tensor00002_000": 1_234}),
        "more sources": dataclasses.replace(FILE, source={**FILE.source, "another": 1}),
        "shape": dataclasses.replace(FILE, parameters={**parameters, name: other}),
        "names": dataclasses.replace(FILE, parameters=layer_parameters(CONFIG, 1)),
    }


@pytest.mark.parametrize("what", other_files())
def test_a_file_of_another_plan_is_none_of_this(what: str, written: Path) -> None:
    assert other_files()[what].facts_in(written) is None


@pytest.mark.parametrize("length", [0, 7, 8, 100, FILE.start, FILE.size - 1, FILE.size + 1])
def test_a_file_of_another_length_is_not_kept(length: int, written: Path) -> None:
    with written.open("r+b") as file:
        file.truncate(length)
    assert FILE.facts_in(written) is None


def test_what_is_no_file_is_not_kept(tmp_path: Path) -> None:
    assert FILE.facts_in(tmp_path / "none") is None
    assert FILE.facts_in(tmp_path) is None


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, FILE.start - 1), value=st.integers(0, 255))
def test_a_changed_header_is_not_kept_or_says_another_hash(
    place: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header = bytearray(FILE.header(FACTS))
    before, header[place] = header[place], value
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(FILE.size)
    facts = FILE.facts_in(path)
    if value == before:
        assert facts == FACTS
    elif facts is not None:
        # A digit of a hash, or a letter of what quantising did, which no header can know.
        changes = [
            name
            for kind in ("tensors", "source", "errors")
            for name, text in getattr(facts, kind).items()
            if getattr(FACTS, kind).get(name) != text
        ]
        assert len(changes) == 1


@pytest.mark.parametrize(
    "metadata",
    [None, [], {"sha256:x": 1}, {"sha256:x": "g" * 64}, {"source:x": "1 " + "0" * 63}, "[" * 9999],
)
def test_a_header_of_another_kind_is_not_kept(metadata: object, tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": metadata}).encode()
    if isinstance(metadata, str):
        text = metadata.encode()
    path = tmp_path / FILE.name
    path.write_bytes((b"\0" * 8 + text).ljust(FILE.size))
    assert FILE.facts_in(path) is None
