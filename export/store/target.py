"""A file that tensors are written into: zeros are left out, and what can be shared is not copied.

Both read as if all had been written.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from export_grok.export.store.file import PAGE_BYTES
from export_grok.export.store.page_cache import WrittenPages
from export_grok.files import output_errors

__all__ = ["Origin", "StoreTarget"]


@dataclass(frozen=True)
class Origin:
    """Where the same bytes lie in another file: its descriptor, and their offset."""

    file: int
    offset: int


class StoreTarget:
    """Takes bytes at any offset of a file that is open for writing.

    A block of zeros becomes a hole. One that begins at a page here and where it comes from is
    copied by the system, which on file systems that can (btrfs, xfs) takes no room: both files
    share it until one is written.
    """

    def __init__(self, file: IO[bytes], path: Path, size: int) -> None:
        """Make `file`, which will be `path`, `size` bytes long; all of it is a hole then.

        Raises:
            OutputError: it cannot be.
        """
        self._file = file.fileno()
        self._path = path
        self._written = WrittenPages(self._file)
        self._shares = hasattr(os, "copy_file_range")
        with output_errors(path):
            os.ftruncate(self._file, size)

    def write(self, block: memoryview, at: int, origin: Origin | None = None) -> None:
        """Write bytes from offset `at` on, once.

        Args:
            block: of them.
            at: offset in this file.
            origin: where the same bytes lie, if they lie in a file.

        Raises:
            OutputError: no room, ...
        """
        if _is_zero(block):
            return
        if origin is None or not self._copied(origin, len(block), at):
            done = 0
            with output_errors(self._path):
                while done < len(block):
                    done += os.pwrite(self._file, block[done:], at + done)
        self._written.add(at, len(block))

    def _copied(self, origin: Origin, length: int, at: int) -> bool:
        """Return whether the system has copied the bytes."""
        if not self._shares or at % PAGE_BYTES or origin.offset % PAGE_BYTES:
            return False
        done = 0
        try:
            while done < length:
                count = os.copy_file_range(
                    origin.file, self._file, length - done, origin.offset + done, at + done
                )
                if not count:
                    return False
                done += count
        except OSError:  # another file system, an old kernel; or no room, as writing will find
            self._shares = False
            return False
        return True


def _is_zero(block: memoryview) -> bool:
    values = np.frombuffer(block, np.uint8)
    return not (values[:PAGE_BYTES].any() or values.any())
