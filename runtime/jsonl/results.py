"""Answers on the disk, a line each as they come, found by the numbers of their requests."""

import array
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from export_grok.errors import OutputError
from export_grok.files import atomic_file, output_errors
from export_grok.regular_file import open_regular
from export_grok.runtime.jsonl.keys import Keys

__all__ = ["Results"]

# A line is with the system at once: only a loss of power takes what came since the last flush.
FLUSH_SECONDS = 5.0

# How every line of ours begins.
BEGINNING = b'{"line": '
MOST_BYTES = 256 << 20


class Results:
    """The answers in one file. In memory is where each begins: 8 bytes a line.

    Attributes:
        path: of the file, which need not be there.
        answers: how many there are.
        others: whole lines that are no answers to these requests.
    """

    def __init__(self, path: Path, keys: Keys) -> None:
        """Begin without any; `keys` are those of the requests."""
        self.path = path
        self.answers = 0
        self.others = 0
        self._keys = keys
        self._places = array.array("q", [-1]) * (keys.last + 1)
        self._failed: set[int] = set()
        self._in_order = True
        self._last = 0  # line of the answer that came last
        self._end = 0  # of the last whole line
        self._size = 0  # of the file when it was last seen
        self._file: IO[bytes] | None = None
        self._flushed = 0.0
        self._sorted = False

    @property
    def errors(self) -> int:
        """How many of the answers ended by an error."""
        return len(self._failed)

    @property
    def whole(self) -> bool:
        """Whether all requests are answered in their order, and nothing else is in the file."""
        return (
            self.answers == self._keys.requests
            and self._in_order
            and not self.others
            and self._size == self._end
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing in the file, not even a part of a line."""
        return not self._size

    def has(self, number: int) -> bool:
        """Return whether the request of a line is answered."""
        return self._places[number] >= 0

    def read(self) -> None:
        """Take what the file holds; a last line that is torn is left out.

        Raises:
            OutputError: it cannot be read, or another run is writing it.
        """
        if not self.path.exists():
            return
        with output_errors(self.path), open_regular(self.path) as file:
            self._lock(file, fcntl.LOCK_SH)
            self._size = os.fstat(file.fileno()).st_size
            if file.read(len(BEGINNING)) != BEGINNING[: self._size]:
                self.others += 1  # a file of something else, however long
                return
            file.seek(0)
            while (line := file.readline(MOST_BYTES)).endswith(b"\n"):
                self._take(line, self._end)
                self._end += len(line)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Have the file open for `add`, and for nobody else, while the block runs.

        Raises:
            OutputError: it cannot be written, or another run is writing it.
        """
        with output_errors(self.path):
            file = self.path.open("ab", buffering=0)
        with file:
            self._lock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size != self._size:
                raise OutputError(
                    f"{self.path} has changed since it was read: another run wrote it; run this "
                    "again, or choose another --out"
                )
            with output_errors(self.path):
                if not self.answers:
                    self._end = 0
                file.truncate(self._end)
                self._size = self._end
            self._file = file
            try:
                yield
            finally:
                self._file = None
                with output_errors(self.path):
                    os.fsync(file.fileno())
                    if self._sorted or not self._size:
                        self.path.unlink()

    def add(self, record: dict[str, Any]) -> None:
        """Append the answer to the request of line `record["line"]`.

        Raises:
            OutputError: there is no room.
        """
        if self._file is None:
            raise AssertionError("results are added while their file is open")
        key = self._keys.get(record["line"]) or b""
        record = {"line": record["line"], **record, "key": key.hex()}
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with output_errors(self.path):
            written = 0
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
            if time.monotonic() >= self._flushed + FLUSH_SECONDS:
                os.fsync(self._file.fileno())
                self._flushed = time.monotonic()
        self._note(record, self._end)
        self._end = self._size = self._end + len(line)

    def write_sorted(self, out: Path) -> None:
        """Write all answers in the order of their requests; this file goes when it is closed.

        Raises:
            OutputError: `out` cannot be written.
        """
        with output_errors(self.path), self.path.open("rb") as file, atomic_file(out) as sorted_:
            for place in self._places:
                if place >= 0:
                    file.seek(place)
                    sorted_.write(file.readline())
        self._sorted = True

    def _take(self, line: bytes, place: int) -> None:
        try:
            record = json.loads(line.decode())  # of bytes it would take UTF-16 too
            number, key = record["line"], record["key"]
            ours = type(number) is int and self._keys.get(number) == bytes.fromhex(key)
        except (KeyError, RecursionError, TypeError, ValueError):
            ours = False
        if ours:
            self._note(record, place)
        else:
            self.others += 1

    def _note(self, record: dict[str, Any], place: int) -> None:
        number = record["line"]
        self.answers += not self.has(number)
        self._places[number] = place
        self._in_order, self._last = self._in_order and number > self._last, number
        if "error" in record:
            self._failed.add(number)

    def _lock(self, file: IO[bytes], kind: int) -> None:
        """Keep other runs away until the file is closed."""
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another run is writing {self.path}; wait for it, or choose another --out"
            ) from error
        except OSError:  # a file system without locks
            pass
