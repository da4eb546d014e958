"""The lines of a file of requests, read as often as need be."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from export_grok.errors import RequestError
from export_grok.files import output_errors
from export_grok.regular_file import open_regular
from export_grok.runtime.prompt_file import STDIN

__all__ = ["Source", "open_source"]

# Longest line: far beyond any prompt. A file without newlines is not read into memory.
MOST_BYTES = 64 << 20


class Source:
    """An open file of lines.

    Attributes:
        name: for messages.
        nbytes: its length.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        """Take a file that can be read from its beginning."""
        self.name = name
        self.nbytes = os.fstat(file.fileno()).st_size
        self._file = file

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line with its number, from 1; one of white space is left out, and counted.

        Raises:
            RequestError: a line is too long, or the file cannot be read.
        """
        number = 0
        with self._told():
            self._file.seek(0)
        while True:
            with self._told():
                line = self._file.readline(MOST_BYTES + 1)
            if not line:
                return
            number += 1
            if len(line) > MOST_BYTES:
                raise RequestError(
                    f"{self.name}: line {number} is longer than {MOST_BYTES >> 20} MB; give one "
                    "request a line"
                )
            if line := line.strip():
                yield number, line

    def lies_at(self, path: Path) -> bool:
        """Return whether a path leads to this very file, by whatever name or link."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except OSError:
            return False

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestError(f"{self.name} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def open_source(path: Path, beside: Path) -> Iterator[Source]:
    """Open a file of requests; of "-", standard input, take a copy first.

    Args:
        path: of a regular file, or "-".
        beside: folder for the copy, which has no name and goes with this process.

    Raises:
        OutputError: there is no room for the copy.
        RequestError: the file cannot be read.
    """
    if path == STDIN:
        with contextlib.ExitStack() as stack:
            with output_errors(beside):
                copy = stack.enter_context(tempfile.TemporaryFile(dir=beside))
                shutil.copyfileobj(sys.stdin.buffer, copy)
                copy.flush()
            yield Source("stdin", copy)
        return
    try:
        file = open_regular(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    with file:
        yield Source(str(path), file)
