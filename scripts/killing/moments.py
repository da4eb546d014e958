"""The moments of a process at which files change; at one of them something happens to it."""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from export_grok import files

__all__ = ["Happens", "Moments"]

# killed: the process is gone, half of what it was writing is there. full: the disk takes no more.
Happens = Literal["killed", "full"]

_CHANGES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
}
_TAKES_ROOM = {"os.mkdir", "os.link", "os.symlink", "os.truncate", "open", "write", "fsync"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


_AS_IT_IS = contextlib.nullcontext()


class Moments:
    """Counts what this process does to the files of a folder, from now to its end.

    Attributes:
        count: of what was done so far.
    """

    def __init__(self, folder: Path, happens: Happens, number: int = -1) -> None:
        """Have something happen.

        Args:
            folder: whose files count; what is written into open files always does.
            happens: what.
            number: at which moment; those that take room on the disk if it is full.
        """
        self.count = 0
        self._folder = str(folder)
        self._happens, self._number = happens, number
        self._lock = threading.Lock()
        self._wrap(os, "pwrite", lambda file, data, at: (data, lambda part: (file, part, at)))
        self._wrap(files._Output, "write", lambda file, data: (data, lambda part: (file, part)))
        self._wrap(os, "write", lambda file, data: (data, lambda part: (file, part)))
        self._wrap(os, "copy_file_range", lambda *args: (None, lambda part: args))
        self._wrap(os, "fsync", lambda *args: (None, lambda part: args))
        sys.addaudithook(self._see)

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES):
            return
        ours = str(args[0]).startswith(self._folder)
        if ours and (event == "open" or event in _CHANGES):
            with self._moment(event):
                pass

    def _wrap(self, place: Any, name: str, parts: Callable[..., Any]) -> None:
        """Have a function that writes be seen."""
        plain = getattr(place, name)

        def seen(*args: Any) -> Any:
            data, with_part = parts(*args)
            raised = files.output_errors(args[0]._path) if place is files._Output else _AS_IT_IS
            with raised, self._moment("fsync" if name == "fsync" else "write") as dies:
                if dies and data is not None:
                    plain(*with_part(memoryview(data)[: len(data) // 2]))
            return plain(*args)

        setattr(place, name, seen)

    @contextlib.contextmanager
    def _moment(self, what: str) -> Iterator[bool]:
        """Count a moment; the block may do what is half done when it is the one."""
        if self._happens == "full" and what not in _TAKES_ROOM:
            yield False
            return
        if self._happens != "full" and what == "fsync":  # changes nothing that a kill would show
            yield False
            return
        with self._lock:
            now = self.count == self._number
            self.count += 1
        yield now and self._happens == "killed"
        if not now:
            return
        if self._happens == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # another thread may take the signal
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
