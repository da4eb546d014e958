"""One file of weights, read once: hashes and values from the same blocks."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from export_grok.export.check.code_values import CodeValues
from export_grok.export.check.findings import Finding
from export_grok.export.check.float_values import FloatValues
from export_grok.regular_file import open_regular
from export_grok.weights import NUMPY_DTYPES, Weight

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["BLOCK_BYTES", "FileResult", "FileToRead", "Signature", "check_file"]

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class FileToRead:
    """A file, and what is known of it before it is read.

    Attributes:
        path: of the file.
        name: what it is called in findings.
        nbytes: its length.
        weights: the tensors in it, which may be none.
        sha256: that all of it must have, in hexadecimal; None if it is not known.
        tensor_sha256: that the bytes of tensors must have, by name.
    """

    path: Path
    name: str
    nbytes: int
    weights: tuple[Weight, ...] = ()
    sha256: str | None = None
    tensor_sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What tells a matrix of codes from others: equal ones have equal bytes.

    Attributes:
        file: that it lies in.
        tensor: name of its tensor.
        index: its own in the tensor, e.g. the expert.
        content: equal for equal matrices.
    """

    file: str
    tensor: str
    index: tuple[int, ...]
    content: tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class FileResult:
    """What reading a file has found.

    Attributes:
        nbytes: that were read.
        hashes: how many were compared and right.
    """

    findings: tuple[Finding, ...]
    signatures: tuple[Signature, ...]
    nbytes: int
    hashes: int


def check_file(
    file: FileToRead,
    *,
    progress: Callable[[int], None] = lambda done: None,
    stop: Event | None = None,
) -> FileResult:
    """Read a file from its first byte to its last and return what is wrong with it.

    Args:
        file: to be read.
        progress: takes how many bytes were read since its last call.
        stop: once it is set, the rest is left out.
    """
    reader = _Reader(file, progress, stop or Event())
    try:
        with open_regular(file.path) as opened:
            reader.read(opened.fileno())
    except OSError as error:
        reader.tell(f"cannot be read: {error.strerror or error}")
    return FileResult(
        findings=tuple(reader.findings),
        signatures=tuple(reader.signatures),
        nbytes=reader.nbytes,
        hashes=reader.hashes,
    )


class _UnreadError(Exception):
    """What kept a part of a file from being read."""


class _Reader:
    def __init__(self, file: FileToRead, progress: Callable[[int], None], stop: Event) -> None:
        self.findings: list[Finding] = []
        self.signatures: list[Signature] = []
        self.nbytes = 0
        self.hashes = 0
        self._file = file
        self._progress = progress
        self._stop = stop
        self._whole = hashlib.sha256() if file.sha256 else None
        self._at = 0  # so far the bytes of the file have passed by
        self._descriptor = -1
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)

    def tell(self, text: str, tensor: str = "") -> None:
        self.findings.append(
            Finding(level="wrong", kind="file", file=self._file.name, tensor=tensor, text=text)
        )

    def read(self, descriptor: int) -> None:
        self._descriptor = descriptor
        for weight in sorted(self._file.weights, key=lambda weight: weight.offset):
            self._read_to(weight.offset)
            try:
                self._read_tensor(weight)
            except _UnreadError as error:  # what follows may be readable
                self.tell(str(error), weight.name)
                self._at = weight.offset + weight.nbytes
                self._whole = None
            if self._stop.is_set():
                return
        self._read_to(os.fstat(descriptor).st_size)
        if self._whole and self._file.sha256:
            self._compare(self._whole, self._file.sha256, "")

    def _read_tensor(self, weight: Weight) -> None:
        values: CodeValues | FloatValues
        if weight.dtype == "int8":
            values = CodeValues(weight, self._scales_of(weight))
        else:
            values = FloatValues(weight)
        expected = self._file.tensor_sha256.get(weight.name)
        found = hashlib.sha256() if expected else None
        offset = weight.offset
        for length in values.cuts(BLOCK_BYTES):
            if self._stop.is_set():
                return
            block = self._block(offset, length)
            values.feed(block)
            if found:
                found.update(block.data)
            offset += length
        self.findings += (
            dataclasses.replace(finding, file=self._file.name) for finding in values.findings()
        )
        if found and expected:
            self._compare(found, expected, weight.name)
        if isinstance(values, CodeValues):
            self.signatures += (
                Signature(
                    file=self._file.name,
                    tensor=weight.name,
                    index=index,
                    content=(weight.shape, weight.groups, signature),
                )
                for index, signature in values.signatures().items()
            )

    def _read_to(self, end: int) -> None:
        """Read what lies before the next tensor, or behind the last."""
        try:
            while self._at < end and not self._stop.is_set():
                self._block(self._at, min(BLOCK_BYTES, end - self._at))
        except _UnreadError as error:
            if not any(finding.kind == "file" for finding in self.findings):
                self.tell(str(error))
            self._at = end
            self._whole = None

    def _block(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Return bytes of the file; they are good until the next are asked for."""
        block = self._buffer[:length]
        place, end = offset, offset + length
        while place < end:
            try:
                count = os.preadv(self._descriptor, [block[place - offset :].data], place)
            except OSError as error:
                reason = error.strerror or error
                raise _UnreadError(f"cannot be read from byte {place:,} on: {reason}") from error
            if not count:
                raise _UnreadError(f"is not there from byte {place:,} on: the file ends")
            place += count
        if self._whole and end > self._at:  # hostile tensors may overlap
            self._whole.update(block[max(0, self._at - offset) :].data)
        self._at = max(self._at, end)
        self.nbytes += length
        self._progress(length)
        return block

    def _scales_of(self, weight: Weight) -> Callable[[int], NDArray[np.float32] | None]:
        name = f"{weight.name.rpartition('.')[0]}.scales"
        *lead, _, columns = (1, 1, *weight.shape)[-max(2, len(weight.shape)) :]
        fits = [
            scales
            for scales in self._file.weights
            if scales.name == name and scales.shape == (*lead, weight.groups or 1, columns)
        ]

        def row(group: int) -> NDArray[np.float32] | None:
            if not fits:
                return None
            dtype = NUMPY_DTYPES[fits[0].dtype]
            length = columns * dtype.itemsize
            try:
                data = os.pread(self._descriptor, length, fits[0].offset + group * length)
            except OSError:  # told when their turn comes
                return None
            return np.frombuffer(data, dtype).astype(np.float32) if len(data) == length else None

        return row

    def _compare(self, found: "_Hash", expected: str, tensor: str) -> None:
        if found.hexdigest() == expected:
            self.hashes += 1
            return
        self.findings.append(
            Finding(
                level="wrong",
                kind="hash",
                file=self._file.name,
                tensor=tensor,
                text=f"has sha256 {found.hexdigest()}, not {expected}: other bytes",
            )
        )
