"""A store holds the bytes of the release, bit for bit, in files that safetensors reads."""

import dataclasses
import hashlib
import itertools
import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.config import GROK_1, GrokConfig
from export_grok.errors import CheckpointError, OutputError
from export_grok.export.checkpoint import open_weights, released_files
from export_grok.export.index_source import IndexSource
from export_grok.export.parameters import layer_parameters
from export_grok.export.released_layout import write_released
from export_grok.export.safetensors_header import read_store_header
from export_grok.export.store.folder import store_files, store_plan, write_store
from export_grok.weights import NUMPY_DTYPES, WeightIndex, WeightReader

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="module")
def source() -> tuple[GrokConfig, WeightIndex]:
    return open_weights(DATA / "tiny8")


@pytest.fixture(scope="module")
def store(
    source: tuple[GrokConfig, WeightIndex], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("store")
    write_store(IndexSource(*source), out)
    return out


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_every_tensor_passes_bit_for_bit(
    source: tuple[GrokConfig, WeightIndex], store: Path
) -> None:
    _, index = source
    _, again = open_weights(store)
    assert list(again.weights) == list(index.weights)
    ours, released = WeightReader(store), WeightReader(index.root)
    for name, weight in index.weights.items():
        place = dataclasses.replace(again[name], file=weight.file, offset=weight.offset)
        assert place == weight
        assert ours.read(again[name]).tobytes() == released.read(weight).tobytes()


def test_the_safetensors_package_reads_it(
    source: tuple[GrokConfig, WeightIndex], store: Path
) -> None:
    safetensors = pytest.importorskip("safetensors")
    config, index = source
    released = WeightReader(index.root)
    names: set[str] = set()
    for file, parameters in store_files(config).items():
        # The package gives no bfloat16 to numpy, so the scales are compared as bytes.
        tensors = dict(safetensors.deserialize((store / file).read_bytes()))
        with safetensors.safe_open(store / file, framework="np") as opened:
            assert set(opened.keys()) == set(parameters)
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                assert opened.get_slice(name).get_shape() == list(index[name].shape)
                if index[name].dtype != "bfloat16":
                    array = opened.get_tensor(name)
                    assert array.dtype == NUMPY_DTYPES[index[name].dtype]
                    assert np.array_equal(array, released.read(index[name]))
                assert tensors[name]["data"] == released.read(index[name]).tobytes()
        names |= set(parameters)
    assert names == set(index.weights)


def test_our_header_reader_finds_what_was_written(
    source: tuple[GrokConfig, WeightIndex], store: Path
) -> None:
    config, _ = source
    _, again = open_weights(store)
    for file, parameters in store_files(config).items():
        found = read_store_header(store / file)
        assert found.keys() == parameters.keys()
        for name, weight in found.items():
            assert dataclasses.replace(weight, groups=again[name].groups) == again[name]


def test_large_tensors_begin_at_a_page() -> None:
    offset = 0
    lengths = (
        NUMPY_DTYPES[p.dtype].itemsize * int(np.prod(p.shape, dtype=np.int64))
        for p in layer_parameters(GROK_1, 0).values()
    )
    for length in sorted(lengths, reverse=True):
        assert offset % 4096 == 0 or length < 4096
        offset += length


def test_data_begins_at_a_page_and_the_largest_is_first(store: Path) -> None:
    for path in store.glob("*.safetensors"):
        weights = sorted(read_store_header(path).values(), key=lambda weight: weight.offset)
        assert weights[0].offset % 4096 == 0
        assert [w.nbytes for w in weights] == sorted((w.nbytes for w in weights), reverse=True)


def test_progress_counts_every_byte(
    source: tuple[GrokConfig, WeightIndex], tmp_path: Path
) -> None:
    total = sum(weight.nbytes for weight in source[1])
    for resume in (False, True):
        done: list[int] = []
        write_store(IndexSource(*source), tmp_path, resume=resume, progress=done.append)
        assert sum(done) == total


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stop_after", [1, 20, 40, 58])
def test_a_stopped_write_goes_on_to_the_same_files(
    source: tuple[GrokConfig, WeightIndex], store: Path, tmp_path: Path, stop_after: int
) -> None:
    calls = 0

    def stop(done: int) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_after:
            raise StoppedError

    with pytest.raises(StoppedError):
        write_store(IndexSource(*source), tmp_path, progress=stop)
    begun = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert all(hashes(store)[path.name] == hashes(tmp_path)[path.name] for path in begun)
    write_store(IndexSource(*source), tmp_path, resume=True)
    assert hashes(tmp_path) == hashes(store)
    assert all(path.stat().st_mtime_ns == before for path, before in begun.items())


KILLED = """
import os, sys
from pathlib import Path
from export_grok.export.checkpoint import open_weights
from export_grok.export.index_source import IndexSource
from export_grok.export.store.folder import write_store
source, out = map(Path, sys.argv[1:])
left = 30
def count(done):
    global left
    left -= 1
    if not left:
        os._exit(9)
write_store(IndexSource(*open_weights(source)), out, workers=1, progress=count)
"""


def test_a_killed_write_goes_on_to_the_same_files(
    source: tuple[GrokConfig, WeightIndex], store: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(source[1].root), str(tmp_path)]
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run(command, cwd=root, check=False).returncode == 9
    assert (tmp_path / ".layer_01.safetensors.partial").exists()
    write_store(IndexSource(*source), tmp_path, resume=True)
    assert hashes(tmp_path) == hashes(store)


def test_a_damaged_file_is_written_again_on_resume(
    source: tuple[GrokConfig, WeightIndex], store: Path, tmp_path: Path
) -> None:
    write_store(IndexSource(*source), tmp_path)
    cut, other = tmp_path / "layer_00.safetensors", tmp_path / "layer_01.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    other.write_bytes(b"\0" * other.stat().st_size)
    write_store(IndexSource(*source), tmp_path, resume=True)
    assert hashes(tmp_path) == hashes(store)


def test_files_of_another_plan_are_not_kept(
    source: tuple[GrokConfig, WeightIndex], tmp_path: Path
) -> None:
    write_store(IndexSource(*source), tmp_path, plan="a")
    before = hashes(tmp_path)
    write_store(IndexSource(*source), tmp_path, plan="b", resume=True)
    same = {name for name, found in hashes(tmp_path).items() if found == before[name]}
    assert same == {"config.json"}


def test_files_of_another_config_are_not_kept(
    source: tuple[GrokConfig, WeightIndex], store: Path, tmp_path: Path
) -> None:
    config, index = source
    other = dataclasses.replace(config, rms_norm_eps=1e-6)
    write_store(IndexSource(other, index), tmp_path)
    file = tmp_path / "layer_00.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    write_store(IndexSource(config, index), tmp_path, resume=True)
    assert hashes(tmp_path) == hashes(store)


def test_the_headers_hold_the_hashes_of_all_that_was_read(
    source: tuple[GrokConfig, WeightIndex], store: Path
) -> None:
    _, index = source
    released = WeightReader(index.root)
    tensors: dict[str, str] = {}
    files: dict[str, str] = {}
    for file in store_plan(IndexSource(*source)):
        facts = file.facts_in(store / file.name)
        assert facts is not None
        assert not facts.errors
        tensors |= facts.tensors
        files |= facts.source
    assert tensors == {
        name: hashlib.sha256(released.read(weight).tobytes()).hexdigest()
        for name, weight in index.weights.items()
    }
    assert files == {
        file: hashlib.sha256((index.root / file).read_bytes()).hexdigest() for file in index.files
    }


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_any_number_of_workers_writes_the_same(
    source: tuple[GrokConfig, WeightIndex], store: Path, tmp_path: Path, workers: int
) -> None:
    write_store(IndexSource(*source), tmp_path, workers=workers)
    assert hashes(tmp_path) == hashes(store)


def test_a_store_of_a_store_holds_the_same_tensors(store: Path, tmp_path: Path) -> None:
    config, index = open_weights(store)
    again = write_store(IndexSource(config, index), tmp_path)
    one, other = WeightReader(store), WeightReader(tmp_path)
    for name, weight in index.weights.items():
        assert one.read(weight).tobytes() == other.read(again[name]).tobytes()


class Altered(IndexSource):
    """A source whose tensors are longer or shorter than they must be."""

    def __init__(self, config: GrokConfig, index: WeightIndex, change: int) -> None:
        super().__init__(config, index)
        self.change = change

    def blocks(self, name: str) -> Iterator[memoryview]:
        whole = b"".join(map(bytes, super().blocks(name)))
        yield memoryview(whole + b"?" * self.change if self.change > 0 else whole[: self.change])


@pytest.mark.parametrize("change", [-1, 1])
def test_a_tensor_of_another_length_is_refused(
    source: tuple[GrokConfig, WeightIndex], tmp_path: Path, change: int
) -> None:
    with pytest.raises(CheckpointError, match=r"came with \d+ bytes; \d+ are needed"):
        write_store(Altered(*source, change), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json"}


def test_one_failure_stops_the_other_workers(
    source: tuple[GrokConfig, WeightIndex], tmp_path: Path
) -> None:
    """Else Ctrl-C, or a full disk, would be noticed hours later."""
    calls = itertools.count()
    both = threading.Barrier(2, timeout=60)

    def stop(_count: int) -> None:
        number = next(calls)
        if number < 2:
            both.wait()
        if number == 0:
            raise StoppedError
        time.sleep(0.05)

    with pytest.raises(StoppedError):
        write_store(IndexSource(*source), tmp_path, workers=2, progress=stop)
    assert next(calls) < 20
    assert not list(tmp_path.glob(".*"))


def test_zeros_take_no_room_and_read_as_zeros(tmp_path: Path) -> None:
    config = dataclasses.replace(open_weights(DATA / "tiny")[0], vocab_size=1 << 16)
    (tmp_path / "sparse" / "ckpt-0").mkdir(parents=True)
    for file, parameters in released_files(config).items():
        write_released(tmp_path / "sparse" / "ckpt-0" / file, parameters, None)
    source = IndexSource(*open_weights(tmp_path / "sparse", config))
    index = write_store(source, tmp_path / "store")
    table = index.root / "embedding.safetensors"
    assert table.stat().st_size > 25_000_000
    assert 512 * table.stat().st_blocks < 100_000
    assert not WeightReader(index.root).read(index["embedding.weight"]).any()
    facts = store_plan(source)[0].facts_in(table)
    assert facts is not None
    zeros = bytes(index["embedding.weight"].nbytes)
    assert facts.tensors["embedding.weight"] == hashlib.sha256(zeros).hexdigest()


def test_first_layers_make_a_smaller_store(tmp_path: Path) -> None:
    write_store(IndexSource(*open_weights(DATA / "deep13", layers=2)), tmp_path)
    config, _ = open_weights(tmp_path)
    assert config.num_layers == 2
    assert len(list(tmp_path.iterdir())) == 4


def test_a_source_that_ends_early_is_named_and_leaves_no_file(
    source: tuple[GrokConfig, WeightIndex], tmp_path: Path
) -> None:
    config, index = source
    weight = index["layers.0.experts.gate.weight"]
    beyond = dataclasses.replace(weight, offset=weight.offset + 200_000)
    missing = dataclasses.replace(weight, file="ckpt-0/none")
    files = {**index.files, missing.file: index.files[weight.file]}
    for wrong, reason in (
        (beyond, "tensor00002_000 ends .* get it again"),
        (missing, "none cannot"),
    ):
        weights = {**index.weights, weight.name: wrong}
        broken = dataclasses.replace(index, weights=weights, files=files)
        with pytest.raises(CheckpointError, match=reason):
            write_store(IndexSource(config, broken), tmp_path, workers=1)
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"config.json", "embedding.safetensors"}


def test_a_place_that_cannot_be_written_is_named(
    source: tuple[GrokConfig, WeightIndex], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write .*file"):
        write_store(IndexSource(*source), tmp_path / "file")


def file_with(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return path


def tensor(begin: Any, end: Any, dtype: Any = "I8", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_plain_header_is_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": tensor(4, 8), "a": tensor(0, 4, "F32", [])}
    found = read_store_header(file_with(tmp_path, header, b"12345678"))
    start = (tmp_path / "x.safetensors").stat().st_size - 8
    assert {n: (w.offset, w.dtype, w.shape) for n, w in found.items()} == {
        "b": (start + 4, "int8", (4,)),
        "a": (start, "float32", ()),
    }


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":1,"a":1}',
        {"a": 1},
        {"a": {}},
        {"a": tensor(0, 8)},
        {"a": tensor(4, 8)},
        {"a": tensor(0, 4)},
        {"a": tensor(0, 4), "b": tensor(0, 4)},
        {"a": tensor(0, 4), "b": tensor(2, 6)},
        {"a": tensor(0, 4), "b": tensor(5, 9)},
        {"a": tensor(-4, 0), "b": tensor(0, 4)},
        {"a": tensor(0, 4), "b": tensor(4, 12, "F64", [1])},
        {"a": tensor(0, 8, "F32", [-1, -2])},
        {"a": tensor(0, 8, "F32", [2.0])},
        {"a": tensor(0, 8, "F32", 2)},
        {"a": tensor(0, 8.0, "F32", [2])},
        {"a": tensor("0", 8, "F32", [2])},
        {"a": tensor(0, 1 << 62, "I8", [1 << 62])},
        {"a": tensor(0, 8, ["F32"], [2])},
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any) -> None:
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_store_header(file_with(tmp_path, header, b"12345678"))


@pytest.mark.parametrize("length", [3, 100_000_001, 1 << 40, (1 << 64) - 1])
def test_a_header_length_beyond_the_file_allocates_nothing(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match="header"):
        read_store_header(file_with(tmp_path, b"{}", length=length))


def test_a_file_that_is_missing_or_has_no_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_store_header(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="short has 7 bytes"):
        read_store_header(tmp_path / "short")


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 3000),
)
def test_a_changed_header_is_a_fault_or_names_bytes_in_the_file(
    store: Path, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray((store / "embedding.safetensors").read_bytes())
    for place, value in changes:
        data[place] = value
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(data[: len(data) - cut] if cut % 2 else data)
    try:
        found = read_store_header(path)
    except CheckpointError:
        return
    assert all(0 < w.offset <= w.offset + w.nbytes <= path.stat().st_size for w in found.values())
