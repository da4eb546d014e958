"""Files that are either whole or not there, and what identifies their content."""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from export_grok.errors import BundleError, OutputError
from export_grok.regular_file import open_regular, read_regular

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "atomic_file",
    "check_new",
    "fingerprint",
    "new_folder",
    "output_errors",
    "read_json",
    "write_json",
]

# A file up to WHOLE_BYTES long is hashed whole, a longer one by SAMPLES blocks.
WHOLE_BYTES = 16 << 20
SAMPLES = 16
SAMPLE_BYTES = 65536


@contextlib.contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn what the system says about writing `path` into one line for the user.

    Raises:
        OutputError: no room, no permission, no such folder, ...
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = (
            "free some space or choose another --out"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "choose another --out"
        )
        raise OutputError(f"cannot write {path}: {reason}; {advice}") from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing so that it appears whole, or not at all.

    The bytes go to a file beside it, which is flushed to the disk and renamed at the end. What
    the block itself raises goes through as it is, once the file beside is removed.

    Raises:
        OutputError: `path` cannot be written. What was begun is removed.
    """
    partial = path.parent / f".{path.name}.partial"
    with output_errors(path):
        raw = _Output(path, partial)
    try:
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            with output_errors(path):
                os.fsync(file.fileno())
        with output_errors(path):
            partial.replace(path)
            _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


class _Output(io.FileIO):
    """The file beside `path`: what the system says about writing it is said of `path`."""

    def __init__(self, path: Path, partial: Path) -> None:
        super().__init__(partial, "wb")
        self._path = path

    def write(self, data: "ReadableBuffer", /) -> int:
        with output_errors(self._path):
            return super().write(data) or 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_new(out: Path) -> None:
    """Hold `out` to being a folder that is new or empty.

    Raises:
        OutputError: it holds something, or is no folder.
    """
    with output_errors(out):
        if out.exists() and any(out.iterdir()):
            raise OutputError(f"{out} is not empty; choose a new folder")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Make `out`, or take it empty, and have it as it was if the block fails.

    Raises:
        OutputError: it holds something, or cannot be made.
    """
    check_new(out)
    with output_errors(out):
        found = out.exists()
        out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        if found:
            out.mkdir(exist_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all.

    Raises:
        OutputError: `path` cannot be written.
    """
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the JSON file `path`.

    Raises:
        BundleError: the file is missing, damaged, or holds no object.
    """
    try:
        value = json.loads(read_regular(path))
    except (OSError, RecursionError, ValueError) as error:
        raise BundleError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BundleError(f"{path} holds a {type(value).__name__}; it must hold an object")
    return value


def fingerprint(path: Path) -> str:
    """Return what tells the content of `path` from another.

    `sha256:` and the hash of a file of up to 16 MiB. A longer one is `sampled:` and the hash of
    its length and of 16 blocks of 64 KiB, spread evenly from its first byte to its last: it sees a
    file that was cut, replaced or rewritten, and reads 1 MiB where the whole is 1.6 GB. It does
    not see every single changed byte.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        length = os.fstat(file.fileno()).st_size
        if length <= WHOLE_BYTES:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        sampled = hashlib.sha256(str(length).encode())
        for sample in range(SAMPLES):
            file.seek((length - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            sampled.update(file.read(SAMPLE_BYTES))
        return "sampled:" + sampled.hexdigest()
