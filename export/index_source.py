"""Tensors that lie in files as they are wanted: those of a weight index, and the files' hashes."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.store.page_cache import let_go
from export_grok.weights import WeightIndex

if TYPE_CHECKING:
    from export_grok.export.quantisation import QuantisedTensor

__all__ = ["FileHash", "IndexSource", "reading"]

BLOCK_BYTES = 8 << 20
# Bytes between two tensors that are read for the file's hash alone. More of them are another
# tensor's, whose turn comes.
MOST_BETWEEN = 1 << 20


class IndexSource:
    """A released checkpoint or a store as a `TensorSource`: its bytes are copied as they are."""

    def __init__(self, config: GrokConfig, index: WeightIndex) -> None:
        """Take what `open_weights` returned."""
        self.config = config
        self.index = index
        self._hashes = {
            file: FileHash(index.root / file, length) for file, length in index.files.items()
        }

    @property
    def layout(self) -> str:
        """What the files are: "released" or "store"."""
        stored = all(file.endswith(".safetensors") for file in self.index.files)
        return "store" if stored else "released"

    @property
    def root(self) -> Path:
        """Folder that the files' paths start from."""
        return self.index.root

    @property
    def files(self) -> Mapping[str, int]:
        """Length in bytes of every file, by path below the root."""
        return self.index.files

    def origins(self, name: str) -> tuple[str, ...]:
        """Return the file that parameter `name` lies in."""
        return (self.index[name].file,)

    def blocks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of parameter `name` in order; each block is good until the next.

        Raises:
            CheckpointError: its file cannot be read to the end of the tensor.
        """
        weight = self.index[name]
        path = self.root / weight.file
        at, end = weight.offset, weight.offset + weight.nbytes
        buffer = memoryview(bytearray(min(BLOCK_BYTES, weight.nbytes)))
        with reading(path) as file, self._hashes[weight.file].following(file, at) as update:
            while at < end:
                count = os.preadv(file, [buffer[: end - at]], at)
                if not count:
                    raise CheckpointError(
                        f"{path} ends {end - at} bytes before {name} does; get it again"
                    )
                update(buffer[:count])
                yield buffer[:count]
                let_go(file, at, count)
                at += count

    def error(self, name: str) -> "QuantisedTensor | None":
        """Return None: nothing is quantised here."""
        return None

    def sha256(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hash of each file that these parameters lie in, whole, by path.

        What passed by in the file's order is not read again.

        Raises:
            CheckpointError: a file cannot be read, or has another length than when it was indexed.
        """
        files = dict.fromkeys(self.index[name].file for name in names)
        return {file: self._hashes[file].whole() for file in files}


class FileHash:
    """The hash of a file from its beginning to where its bytes have passed by in order."""

    def __init__(self, path: Path, length: int) -> None:
        self._path = path
        self._length = length
        self._hash = hashlib.sha256()
        self._at = 0
        self._is_followed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def following(self, file: int, offset: int) -> Iterator[Callable[[memoryview], None]]:
        """Yield what takes the bytes of the open `file` that are read from `offset` on.

        It forgets them if they are not the next, or if another thread is giving the file's bytes.
        """
        with self._lock:
            if self._is_followed:
                follows = False
            else:
                if 0 <= offset - self._at <= MOST_BETWEEN:
                    self._read(file, offset)
                self._is_followed = follows = self._at == offset
        try:
            yield self._take if follows else lambda block: None
        finally:
            if follows:
                self._is_followed = False

    def whole(self) -> str:
        """Return the hash of all of the file; what has not passed by is read.

        Raises:
            CheckpointError: it cannot be read, or has another length than was said.
        """
        with self._lock:
            if self._is_followed:  # by a thread that may never come to an end
                return FileHash(self._path, self._length).whole()
            with reading(self._path) as file:
                self._read(file, self._length)
                length = os.fstat(file).st_size
            if length != self._length:
                raise CheckpointError(
                    f"{self._path} has {length} bytes; it had {self._length} when it was looked "
                    "at: leave it alone while it is read"
                )
            return self._hash.hexdigest()

    def _take(self, block: memoryview) -> None:
        self._hash.update(block)
        self._at += len(block)

    def _read(self, file: int, end: int) -> None:
        while self._at < end:
            block = os.pread(file, min(BLOCK_BYTES, end - self._at), self._at)
            if not block:
                return
            self._take(memoryview(block))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """Open a file past Python's buffers, and yield its descriptor.

    Raises:
        CheckpointError: it cannot be opened, or the block fails with what the system says.
    """
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            yield file
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
