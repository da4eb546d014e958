"""The bytes of a pickle and the values they make, with every step checked.

No length is believed before it is compared with what is left of the file.
"""

from pathlib import Path
from typing import BinaryIO

from export_grok.errors import CheckpointError

__all__ = ["PickleMachine"]

# The longest name in a released file has 21 letters. The bound keeps a hostile file out of memory.
MAX_NAME_BYTES = 255


class PickleMachine:
    """What a pickle works with: its bytes, a stack with marks, and a memo.

    What the values mean is left to a subclass. Every method raises CheckpointError where the file
    is cut, does not fit its own frames, or takes values that it did not make.

    Attributes:
        path: of the file, for messages.
        at: offset of the next byte.
        size: of the file.
        stack: the values made, the newest last.
        marks: how long the stack was at each mark.
        memo: values kept to be recalled.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.at, self.size = path, 0, size
        self._file, self._frame_end = file, 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def _move(self, count: int) -> int:
        start, left = self.at, self.size - self.at
        if count > left:
            raise self.fault(f"is cut or damaged: it needs {count} bytes more and has {left}")
        if start < self._frame_end < start + count:
            raise self.fault("has a step that does not end with its frame")
        self.at += count
        return start

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        self._move(count)
        data = self._file.read(count)
        if len(data) != count:
            raise self.fault("became shorter while it was read")
        return data

    def skip(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        start = self._move(count)
        self._file.seek(self.at)
        return start

    def open_frame(self, length: int) -> None:
        """Begin a frame: the next `length` bytes hold whole steps."""
        if self.at < self._frame_end or length > self.size - self.at:
            raise self.fault(f"has a frame of {length} bytes that does not fit")
        self._frame_end = self.at + length

    def number(self, width: int, *, signed: bool = False) -> int:
        """Return a little-endian number of `width` bytes."""
        return int.from_bytes(self.take(width), "little", signed=signed)

    def text(self, length: int) -> str:
        """Return a name of `length` bytes."""
        if length > MAX_NAME_BYTES:
            raise self.fault(f"has a name of {length} bytes")
        return self._decoded(self.take(length))

    def line(self) -> str:
        """Return a name that ends with its line."""
        line = b""
        while not line.endswith(b"\n"):
            if len(line) > MAX_NAME_BYTES:
                raise self.fault(f"has a name of more than {MAX_NAME_BYTES} bytes")
            line += self.take(1)
        return self._decoded(line[:-1])

    def _decoded(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.fault("has a name that is no UTF-8") from error

    def fault(self, what: str) -> CheckpointError:
        """Return the error that says `what` is wrong with the file, and where."""
        return CheckpointError(f"{self.path} {what} (before byte {self.at}); fetch it again")

    def top(self) -> object:
        """Return the newest value."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise self.fault("takes more values than it made")
        return self.stack[-1]

    def pop(self) -> object:
        """Take the newest value."""
        self.top()
        return self.stack.pop()

    def pop_mark(self) -> list[object]:
        """Take the values since the last mark."""
        if not self.marks:
            raise self.fault("takes more values than it made")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def set_items(self, values: list[object]) -> None:
        """Fill the newest value, a table, with keys and values in turn."""
        target, keys = self.top(), values[::2]
        if not isinstance(target, dict) or len(values) % 2:
            raise self.fault("fills something that is no table")
        if not all(isinstance(key, str) for key in keys):
            raise self.fault("fills a table whose keys are no text")
        target.update(zip(keys, values[1::2], strict=True))

    def recall(self, slot: int) -> None:
        """Push the value that was kept in `slot`."""
        if slot not in self.memo:
            raise self.fault(f"recalls value {slot}, which it did not keep")
        self.stack.append(self.memo[slot])
