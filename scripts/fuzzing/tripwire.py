"""Sees that a file is opened, by whatever code."""

import ctypes
import os
from pathlib import Path

__all__ = ["Tripwire"]

_IN_ACCESS, _IN_OPEN = 0x1, 0x20


class Tripwire:
    """A file that nobody may open; the system tells if somebody does."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._queue = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = _IN_ACCESS | _IN_OPEN
        if library.inotify_add_watch(self._queue, os.fsencode(path), mask) < 0:
            raise OSError(ctypes.get_errno(), "cannot be watched", str(path))

    def touched(self) -> bool:
        """Return whether it was opened since the last call."""
        try:
            return bool(os.read(self._queue, 1 << 16))
        except BlockingIOError:
            return False
