"""What is written through holes and shared blocks reads as if it had been written plainly."""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.errors import OutputError
from export_grok.export.store.target import Origin, StoreTarget

PAGE = 4096
SIZE = 16 * PAGE


@contextmanager
def target(path: Path, size: int = SIZE) -> Iterator[StoreTarget]:
    """Open a file of zeros to write into."""
    with path.open("wb") as file:
        yield StoreTarget(file, path, size)


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[int]:
    """Open a file of random bytes, whose first page is zero."""
    path = tmp_path / "origin"
    path.write_bytes(bytes(PAGE) + random.Random(0).randbytes(SIZE - PAGE))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def copies(monkeypatch: pytest.MonkeyPatch, *, fail: int = 0, most: int = SIZE) -> list[int]:
    """Note how many bytes the system copied in each call, and have it fail at the call `fail`."""
    done: list[int] = []
    real = os.copy_file_range

    def copy(file: int, to: int, count: int, offset: int, to_offset: int) -> int:
        if fail and len(done) + 1 >= fail:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        done.append(real(file, to, min(count, most), offset, to_offset))
        return done[-1]

    monkeypatch.setattr(os, "copy_file_range", copy)
    return done


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 3 * PAGE), st.sampled_from(["zeros", "values", "one value"])),
        max_size=12,
    )
)
def test_any_blocks_read_as_they_were_written(
    parts: list[tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "target"
    blocks = []
    for seed, (length, kind) in enumerate(parts):
        block = bytearray(length)
        if kind == "values":
            block[:] = random.Random(seed).randbytes(length)
        elif kind == "one value":
            block[seed % length] = 1
        blocks.append(bytes(block))
    size = sum(map(len, blocks)) + 5
    with target(path, size) as opened:
        at = 0
        for written in blocks:
            opened.write(memoryview(written), at)
            at += len(written)
    assert path.read_bytes() == b"".join(blocks) + bytes(5)


def test_zeros_take_no_room(tmp_path: Path) -> None:
    size = 1 << 30
    with target(tmp_path / "out", size) as opened:
        opened.write(memoryview(bytes(1 << 20)), 0)
        opened.write(memoryview(bytes(PAGE) + b"x"), 1 << 20)
    status = (tmp_path / "out").stat()
    assert status.st_size == size
    assert 512 * status.st_blocks < 1 << 20


def test_whole_pages_that_lie_in_a_file_are_copied_by_the_system(
    origin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = copies(monkeypatch, most=3000)
    content = os.pread(origin, SIZE, 0)
    with target(tmp_path / "out") as opened:
        opened.write(memoryview(content)[PAGE : 4 * PAGE], 2 * PAGE, Origin(origin, PAGE))
    written = (tmp_path / "out").read_bytes()
    assert written[2 * PAGE : 5 * PAGE] == content[PAGE : 4 * PAGE]
    assert not any(written[: 2 * PAGE] + written[5 * PAGE :])
    assert sum(done) == 3 * PAGE


@pytest.mark.parametrize(("offset", "at"), [(PAGE, 1), (PAGE + 201, 0), (PAGE + 8, PAGE + 8)])
def test_what_begins_within_a_page_is_written(
    offset: int, at: int, origin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = copies(monkeypatch)
    content = os.pread(origin, PAGE, offset)
    with target(tmp_path / "out") as opened:
        opened.write(memoryview(content), at, Origin(origin, offset))
    assert (tmp_path / "out").read_bytes()[at : at + PAGE] == content
    assert not done


def test_zeros_are_not_copied(
    origin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = copies(monkeypatch)
    with target(tmp_path / "out") as opened:
        opened.write(memoryview(bytes(PAGE)), 0, Origin(origin, 0))
    assert (tmp_path / "out").read_bytes() == bytes(SIZE)
    assert not done


@pytest.mark.parametrize("fail", [1, 2, 3])
def test_where_the_system_cannot_copy_it_is_written(
    fail: int, origin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = copies(monkeypatch, fail=fail, most=PAGE)
    content = os.pread(origin, SIZE, 0)
    with target(tmp_path / "out") as opened:
        for at in range(PAGE, SIZE, 3 * PAGE):
            opened.write(memoryview(content)[at : at + 3 * PAGE], at, Origin(origin, at))
    assert (tmp_path / "out").read_bytes() == content
    assert len(done) == fail - 1  # nor is it asked again


def test_a_system_without_such_copies_writes(
    origin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    content = os.pread(origin, SIZE, 0)
    with target(tmp_path / "out") as opened:
        opened.write(memoryview(content)[PAGE:], PAGE, Origin(origin, PAGE))
    assert (tmp_path / "out").read_bytes() == content


def test_a_full_disk_is_told_with_the_file(
    origin: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr(os, "pwrite", full)
    with (
        target(tmp_path / "out") as opened,
        pytest.raises(OutputError, match=r"cannot write .*out: No space left"),
    ):
        opened.write(memoryview(b"x" * PAGE), 0, Origin(origin, PAGE))
