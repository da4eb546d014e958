"""A file is whole or not there, the error says what went wrong, a fingerprint sees new content."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_grok.errors import BundleError, OutputError
from export_grok.files import (
    SAMPLE_BYTES,
    WHOLE_BYTES,
    atomic_file,
    fingerprint,
    output_errors,
    read_json,
    write_json,
)

ADVICE = {
    errno.ENOSPC: "free some space or choose another --out",
    errno.EDQUOT: "free some space or choose another --out",
    errno.EACCES: "choose another --out",
    errno.EROFS: "choose another --out",
    errno.EIO: "choose another --out",
}

# All examples share the test's folder; each of them leaves it as it was.
shared_folder = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@contextmanager
def room_for(length: int) -> Iterator[None]:
    """Let the system refuse to write more than the first `length` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_with(number: int) -> Any:
    def fail(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@shared_folder
@given(parts=st.lists(st.binary(max_size=20_000), max_size=5))
def test_what_was_written_is_there_whole(parts: list[bytes], tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a") as file:
        for part in parts:
            file.write(part)
        assert not (tmp_path / "a").exists()
    assert held(tmp_path) == {"a": b"".join(parts)}
    (tmp_path / "a").unlink()


def test_a_hole_can_be_left_and_filled(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a") as file:
        file.seek(3)
        file.write(b"d")
        file.seek(0)
        file.write(b"ab")
    assert held(tmp_path) == {"a": b"ab\0d"}


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_crash_leaves_what_was_there_before(
    kind: type[BaseException], old: bytes | None, tmp_path: Path
) -> None:
    before = {}
    if old is not None:
        (tmp_path / "a").write_bytes(old)
        before = {"a": old}
    with pytest.raises(kind), atomic_file(tmp_path / "a") as file:
        file.write(b"new" * 10_000)
        raise kind
    assert held(tmp_path) == before


def test_a_source_that_cannot_be_read_is_no_fault_of_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, atomic_file(tmp_path / "a") as file:
        file.write((tmp_path / "source").read_bytes())
    assert caught.value.filename == str(tmp_path / "source")
    assert held(tmp_path) == {}


@pytest.mark.parametrize("number", ADVICE)
@pytest.mark.parametrize("step", ["open", "flush", "rename"])
def test_a_system_that_refuses_is_told_in_one_line(
    number: int, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    if step == "open":
        monkeypatch.setattr("export_grok.files._Output.__init__", fail_with(number))
    elif step == "rename":
        monkeypatch.setattr(Path, "replace", fail_with(number))
    else:
        monkeypatch.setattr(os, "fsync", fail_with(number))
    with pytest.raises(OutputError) as caught, atomic_file(path) as file:
        file.write(b"new")
    assert str(caught.value) == f"cannot write {path}: {os.strerror(number)}; {ADVICE[number]}"
    assert isinstance(caught.value.__cause__, OSError)
    assert held(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("blocks", [1, 2, 300])
def test_a_disk_that_takes_no_more_bytes_is_told_in_one_line(blocks: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(OutputError) as caught, room_for(1000), atomic_file(path) as file:
        for _ in range(blocks):
            file.write(b"x" * 1001)
    reason = os.strerror(errno.EFBIG)
    assert str(caught.value) == f"cannot write {path}: {reason}; choose another --out"
    assert held(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("place", ["file/a", "file/b/a", "none/a", "folder", ".", "x" * 300])
def test_a_place_that_cannot_be_written_is_told_in_one_line(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"")
    Path("folder").mkdir()
    with pytest.raises(OutputError) as caught, atomic_file(Path(place)) as file:
        file.write(b"new")
    assert str(caught.value).startswith(f"cannot write {place}: ")
    assert str(caught.value).count("\n") == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_only_what_the_system_says_is_said_of_the_output(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), output_errors(tmp_path):
        raise ValueError("mine")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@shared_folder
@given(value=st.dictionaries(st.text(), json_values, max_size=5))
def test_an_object_survives_json(value: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert held(tmp_path).keys() == {"a.json"}


@shared_folder
@given(content=st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_one_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    try:
        assert isinstance(read_json(path), dict)
    except BundleError as error:
        assert str(path) in str(error)


def test_json_nested_without_end_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(BundleError, match="cannot be read as JSON"):
        read_json(path)


@pytest.mark.parametrize("path", ["none.json", "."])
def test_json_that_is_not_there_is_one_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read as JSON"):
        read_json(tmp_path / path)


@shared_folder
@given(content=st.binary(min_size=1, max_size=2000), data=st.data())
def test_any_changed_byte_of_a_small_file_is_seen(
    content: bytes, data: st.DataObject, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    before = fingerprint(path)
    place = data.draw(st.integers(0, len(content) - 1))
    change = data.draw(st.integers(1, 255))
    changed = bytearray(content)
    changed[place] ^= change
    path.write_bytes(changed)
    assert fingerprint(path) != before
    path.write_bytes(content)
    assert fingerprint(path) == before


@pytest.mark.parametrize("place", [0, 1, WHOLE_BYTES // 3, WHOLE_BYTES - 1])
def test_any_changed_byte_up_to_16_mib_is_seen(place: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = bytearray(WHOLE_BYTES)
    path.write_bytes(content)
    before = fingerprint(path)
    assert before.startswith("sha256:")
    content[place] = 1
    path.write_bytes(content)
    assert fingerprint(path) != before


LONG = 3 * WHOLE_BYTES + 12345


@pytest.fixture
def long_file(tmp_path: Path) -> Path:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(LONG)
    return path


@pytest.mark.parametrize(
    "length", [LONG - 1, LONG + 1, LONG // 2, WHOLE_BYTES, WHOLE_BYTES + 1, 0]
)
def test_a_long_file_that_was_cut_or_grew_is_seen(length: int, long_file: Path) -> None:
    before = fingerprint(long_file)
    assert before.startswith("sampled:")
    os.truncate(long_file, length)
    assert fingerprint(long_file) != before


@pytest.mark.parametrize("place", [0, SAMPLE_BYTES - 1, LONG - SAMPLE_BYTES, LONG - 1])
def test_both_ends_of_a_long_file_are_seen(place: int, long_file: Path) -> None:
    before = fingerprint(long_file)
    with long_file.open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert fingerprint(long_file) != before


@settings(shared_folder, max_examples=20)
@given(start=st.integers(0, LONG * 14 // 15))
def test_a_long_file_with_a_fifteenth_rewritten_is_seen(start: int, long_file: Path) -> None:
    before = fingerprint(long_file)
    with long_file.open("r+b") as file:
        file.seek(start)
        file.write(b"x" * (LONG // 15))
    assert fingerprint(long_file) != before
    with long_file.open("r+b") as file:
        file.seek(start)
        file.write(bytes(LONG // 15))
    assert fingerprint(long_file) == before


def test_a_long_file_that_was_replaced_is_seen(long_file: Path) -> None:
    before = fingerprint(long_file)
    long_file.write_bytes(b"\1" * LONG)
    assert fingerprint(long_file) != before


def test_a_fingerprint_is_of_the_content_alone(tmp_path: Path, long_file: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes(long_file.read_bytes())
    os.utime(copy, (0, 0))
    assert fingerprint(copy) == fingerprint(long_file)
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "none")
