"""Tensors of an index come as they lie, and the hash of every file is that of all its bytes."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.errors import CheckpointError
from export_grok.export import index_source
from export_grok.export.checkpoint import open_weights
from export_grok.export.index_source import MOST_BETWEEN, FileHash, IndexSource
from export_grok.export.store.folder import write_store
from export_grok.export.tensor_source import TensorSource
from export_grok.weights import WeightReader
from tests.bundles import checkpoint_copy
from tests.conftest import DATA

CONFIG, INDEX = open_weights(DATA / "tiny")
NAMES = list(INDEX.weights)
HASHES = {
    file: hashlib.sha256((INDEX.root / file).read_bytes()).hexdigest() for file in INDEX.files
}


@pytest.fixture(scope="module", autouse=True)
def short_blocks() -> Iterator[None]:
    """Have small tensors come in several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_source, "BLOCK_BYTES", 5000)
        yield


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Count the bytes that are read for hashes alone."""
    counts: list[int] = []
    real = os.pread

    def pread(file: int, length: int, offset: int) -> bytes:
        block = real(file, length, offset)
        counts.append(len(block))
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", pread)
        yield counts


def test_it_offers_what_the_index_holds(tmp_path: Path) -> None:
    source: TensorSource = IndexSource(CONFIG, INDEX)
    reader = WeightReader(INDEX.root)
    assert (source.layout, source.config, source.root) == ("released", CONFIG, INDEX.root)
    assert source.files == INDEX.files
    for name, weight in INDEX.weights.items():
        assert b"".join(map(bytes, source.blocks(name))) == reader.read(weight).tobytes()
        assert source.origins(name) == (weight.file,)
        assert source.error(name) is None
    write_store(source, tmp_path)
    assert IndexSource(*open_weights(tmp_path)).layout == "store"


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations(NAMES),
    count=st.integers(0, len(NAMES)),
    cut=st.sets(st.sampled_from(NAMES)),
)
def test_hashes_are_those_of_whole_files_whatever_was_read_before(
    order: list[str], count: int, cut: set[str]
) -> None:
    source = IndexSource(CONFIG, INDEX)
    for name in order[:count]:
        blocks = source.blocks(name)
        next(blocks)
        if name not in cut:
            list(blocks)
        del blocks
    assert source.sha256(NAMES) == HASHES
    assert source.sha256(NAMES) == HASHES


def test_what_passed_by_in_order_is_not_read_again() -> None:
    source = IndexSource(CONFIG, INDEX)
    # The scales lie behind their weight; other tensors are read in between.
    with counted_reads() as read:
        for kind in (".weight", ".scales", ".scale"):
            for name in NAMES:
                if name.endswith(kind):
                    list(source.blocks(name))
        assert source.sha256(NAMES) == HASHES
    pickled = sum(INDEX.files.values()) - sum(weight.nbytes for weight in INDEX)
    assert sum(read) == pickled


def test_a_tensor_that_is_skipped_is_not_read_for_the_hash_before_its_turn(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MOST_BETWEEN + 10))
    file = FileHash(path, MOST_BETWEEN + 10)
    descriptor = os.open(path, os.O_RDONLY)
    with counted_reads() as read:
        with file.following(descriptor, MOST_BETWEEN + 1) as update:
            update(memoryview(b"not the next"))
        assert not read
        with file.following(descriptor, MOST_BETWEEN):
            pass
        assert sum(read) == MOST_BETWEEN
    os.close(descriptor)
    assert file.whole() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_threads_that_share_a_file_do_not_disturb_its_hash(tmp_path: Path) -> None:
    write_store(IndexSource(CONFIG, INDEX), tmp_path)
    config, index = open_weights(tmp_path)
    source = IndexSource(config, index)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: list(source.blocks(name)), NAMES * 3))
    for file, found in source.sha256(NAMES).items():
        assert found == hashlib.sha256((tmp_path / file).read_bytes()).hexdigest()


def test_a_reader_that_stops_halfway_keeps_nobody_waiting() -> None:
    source = IndexSource(CONFIG, INDEX)
    blocks = source.blocks(NAMES[0])
    next(blocks)
    assert source.sha256(NAMES) == HASHES
    list(blocks)
    assert source.sha256(NAMES) == HASHES


@pytest.mark.parametrize("length", [-1, 1])
def test_a_file_that_changes_its_length_is_named(tmp_path: Path, length: int) -> None:
    checkpoint = checkpoint_copy("tiny", tmp_path / "tiny")
    source = IndexSource(*open_weights(checkpoint))
    path = checkpoint / source.origins("final_norm.scale")[0]
    os.truncate(path, path.stat().st_size + length)
    with pytest.raises(CheckpointError, match=r"tensor00001_000 has \d+ bytes; it had \d+"):
        source.sha256(["final_norm.scale"])


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    checkpoint = checkpoint_copy("tiny", tmp_path / "tiny")
    source = IndexSource(*open_weights(checkpoint))
    (checkpoint / "ckpt-0" / "tensor00001_000").unlink()
    for read in (source.sha256, lambda names: list(source.blocks(names[0]))):
        with pytest.raises(CheckpointError, match="tensor00001_000 cannot be read: No such file"):
            read(["final_norm.scale"])


def test_a_file_that_ends_within_a_tensor_is_named(tmp_path: Path) -> None:
    config, index = open_weights(checkpoint_copy("tiny", tmp_path / "tiny"))
    weight = index["embedding.weight"]
    beyond = dataclasses.replace(weight, offset=weight.offset + 1000)
    weights = {**index.weights, weight.name: beyond}
    source = IndexSource(config, dataclasses.replace(index, weights=weights))
    with pytest.raises(CheckpointError, match=r"ends \d+ bytes before embedding\.weight does"):
        list(source.blocks("embedding.weight"))
