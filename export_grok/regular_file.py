"""Files opened for reading, and nothing that only looks like one.

A pipe keeps whoever opens it waiting, and `/dev/zero` has no end. Either may lie where a file was
expected, behind a link too.
"""

import errno
import io
import os
import stat
from pathlib import Path

__all__ = ["MAX_BYTES", "open_regular", "read_regular"]

# Far beyond any file that is read whole: the manifest of 64 layers has 0.3 MB.
MAX_BYTES = 64 << 20


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: it is none, or cannot be opened.
    """
    # O_NONBLOCK: to open a pipe that nobody writes into would take for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, *, most: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most so many bytes.

    Raises:
        OSError: it is none, is longer, or cannot be read.
    """
    with open_regular(path) as file:
        length = os.fstat(file.fileno()).st_size
        if length > most:
            raise OSError(errno.EFBIG, f"it has {length} bytes, and {most} at most", str(path))
        return file.read(length)
