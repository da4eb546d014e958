"""What a process does while it is watched: what it opens, runs and takes of memory."""

import contextlib
import encodings
import importlib
import os
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.fuzzing.place import place_in

__all__ = ["Forbidden", "Watch"]

# Where what belongs to the program itself lies.
PROGRAM = tuple(
    f"{Path(place).resolve()}/"
    for place in (
        Path(__file__).parents[2],
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("stdlib"),
        "/sys/devices/system",
        "/proc/self",
    )
)
# Anything that runs something, speaks to somebody, or takes what it is told to import.
FORBIDDEN = re.compile(
    r"os\.(system|exec|posix_spawn|spawn|fork|forkpty|startfile|kill|putenv|unsetenv|ch.*)"
    r"|subprocess\..*|pty\..*|socket\..*|urllib\..*|http\..*|ftplib\..*|smtplib\..*|ssl\..*"
    r"|ctypes\..*|pickle\..*|marshal\..*|code\..*|exec|import|cpython\.run.*"
    r"|webbrowser\..*|syslog\..*|sqlite3\..*"
)
# Anything that changes files; the first argument says which.
CHANGES = re.compile(
    r"os\.(remove|rename|mkdir|rmdir|link|symlink|truncate|utime|listxattr|setxattr)|shutil\..*"
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# What Python loads for text in another encoding than UTF-8: all of it is here from now on.
for _encoding in pkgutil.iter_modules(encodings.__path__):
    with contextlib.suppress(ImportError):  # another system's
        importlib.import_module(f"encodings.{_encoding.name}")


class Forbidden(BaseException):
    """A reader did what none may do; no handler of errors catches it on the way."""


class Watch:
    """Sees what Python does in this process, from now to its end, while it is on.

    What is forbidden does not happen: it ends what was going on. Code that is not Python's is seen
    by its memory only.

    Attributes:
        faults: what was done and where, since it was last on.
    """

    def __init__(self, folder: Path, beside: Path | None, *, spare: int) -> None:
        """Begin.

        Args:
            folder: that may be read and written.
            beside: that may be read.
            spare: bytes that may be taken while it is on.
        """
        self.faults: list[tuple[str, str]] = []
        self._read = (*PROGRAM, *([f"{beside}/"] if beside else []))
        self._folder, self._spare, self._on = f"{folder}/", spare, False
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        sys.addaudithook(self._see)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watch what the block does; its faults are there afterwards."""
        self.faults.clear()
        size, peak = self._memory()
        self._on = True
        try:
            yield
        finally:
            self._on = False
            highest = self._memory()[1]
            if highest > max(peak, size + self._spare):
                self.faults.append((f"{(highest - size) >> 20} MiB were taken", "memory"))

    def _memory(self) -> tuple[int, int]:
        """Return how many bytes of address space the process has, and most ever had."""
        fields = dict(re.findall(rb"(VmSize|VmPeak):\s*(\d+)", os.pread(self._status, 4096, 0)))
        return int(fields[b"VmSize"]) << 10, int(fields[b"VmPeak"]) << 10

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        self._on = False  # what is done here is ours
        try:
            fault = self._fault(event, args)
            if fault:
                where = place_in(traceback.extract_stack())
                self.faults.append((fault, f"{event} at {where}"))
        finally:
            self._on = True
        if fault:
            raise Forbidden(fault)

    def _fault(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "open":
            path, _, flags = args
            return self._opened(path, bool(flags & WRITES))
        if CHANGES.fullmatch(event):
            return self._opened(args[0], True)
        if FORBIDDEN.fullmatch(event):
            return f"{event} {args!r:.200}"
        return None

    def _opened(self, path: Any, write: bool) -> str | None:
        if isinstance(path, int):
            return None  # it was opened before
        name = os.path.abspath(os.fsdecode(path))
        if name == self._folder[:-1] or name.startswith(self._folder):
            return None
        if not write and name.startswith(self._read):
            return None
        return f"{'writes' if write else 'opens'} {name}"
