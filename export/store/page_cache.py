"""The system's memory of files, for copies that are longer than it.

Left alone, a copy fills memory with pages that nobody will want again. The system then spends more
time on finding pages to drop than on copying, and drops what other programs need.
"""

import os
from collections import deque

__all__ = ["WrittenPages", "let_go"]

# Bytes that are sent to the disk together: as many lie together there when files take turns.
SENT_BYTES = 32 << 20
# Such pieces of a file that may be on their way.
BEHIND = 2


def let_go(file: int, offset: int, length: int) -> None:
    """Drop bytes of an open file from memory, or if they are not on the disk yet, write them.

    It does not wait, and what it cannot drop stays.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, offset, length, os.POSIX_FADV_DONTNEED)


class WrittenPages:
    """Sends what is written to a file on to the disk, and drops it some time later."""

    def __init__(self, file: int) -> None:
        """Take a file that is open for writing."""
        self._file = file
        self._begin = self._end = 0
        self._sent: deque[tuple[int, int]] = deque()

    def add(self, offset: int, length: int) -> None:
        """Take note that bytes were written."""
        if offset != self._end:
            self._send()
            self._begin = offset
        self._end = offset + length
        if self._end - self._begin >= SENT_BYTES:
            self._send()

    def _send(self) -> None:
        if self._end > self._begin:
            self._sent.append((self._begin, self._end - self._begin))
            let_go(self._file, *self._sent[-1])
            if len(self._sent) > BEHIND:
                let_go(self._file, *self._sent.popleft())
        self._begin = self._end
