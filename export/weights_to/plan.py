"""Files that are known whole, down to where each tensor lies, before a byte is written."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from export_grok.files import atomic_file

__all__ = ["PlannedFile", "PlannedTensor", "json_file", "padded"]


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor of a file.

    Attributes:
        name: that others know it by.
        dtype: as their format calls it.
        shape: in numpy's order, a matrix [out, in].
        blocks: yields its bytes in order, as arrays of any length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: Callable[[], Iterator[NDArray[Any]]]


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file: its header, and the tensors behind it in order.

    Attributes:
        header: its first bytes; all of a file without tensors.
        alignment: every tensor is filled up with zeros to a multiple of so many bytes.
    """

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...] = ()
    alignment: int = 1

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        tensors = sum(padded(tensor.nbytes, self.alignment) for tensor in self.tensors)
        return len(self.header) + tensors

    def is_whole(self, path: Path) -> bool:
        """Return whether the file at `path` is this one, by its length and header."""
        try:
            with path.open("rb") as file:
                length = path.stat().st_size
                return length == self.nbytes and file.read(len(self.header)) == self.header
        except OSError:
            return False

    def write(self, path: Path, progress: Callable[[int], None]) -> None:
        """Write it, so that it appears whole or not at all.

        Args:
            path: of the file.
            progress: takes how many bytes were written since its last call.

        Raises:
            CheckpointError: a tensor cannot be read, or has a value that its dtype has not.
            OutputError: `path` cannot be written.
        """
        with atomic_file(path) as file:
            file.write(self.header)
            progress(len(self.header))
            for tensor in self.tensors:
                written = 0
                for block in tensor.blocks():
                    length = file.write(block.data)
                    written += length
                    progress(length)
                if written != tensor.nbytes:
                    raise AssertionError(f"{tensor.name}: {written} bytes, not {tensor.nbytes}")
                filling = bytes(padded(written, self.alignment) - written)
                file.write(filling)
                progress(len(filling))


def json_file(name: str, value: Any) -> PlannedFile:
    """Return a file of JSON."""
    return PlannedFile(name=name, header=json.dumps(value, indent=2).encode() + b"\n")


def padded(length: int, alignment: int) -> int:
    """Return `length` rounded up to a multiple of `alignment`."""
    return -(-length // alignment) * alignment
