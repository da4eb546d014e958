"""What a disk gives, and how files are taken out of memory."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np

__all__ = ["disk_rate", "drop_from_memory"]

BLOCK = 16 << 20
THREADS = 2


def disk_rate(path: Path, *, half: int) -> float:
    """Return the bytes per second that two threads read together, past all caches of the system.

    Each takes the next block of 16 MiB until half of the file is read.

    Args:
        path: of the file.
        half: 0 or 1. What the machine below this one keeps of one half does not speed the other.

    Raises:
        ClickException: the file has no two blocks, or the file system no O_DIRECT.
    """
    count = path.stat().st_size // BLOCK // 2
    if not count:
        raise click.ClickException(
            f"{path} is too short to measure the disk with; give a checkpoint of full size"
        )
    turn = iter(range(half * count, (half + 1) * count))

    def read(_thread: int) -> int:
        # Such memory begins at a page, as O_DIRECT wants it.
        with mmap.mmap(-1, BLOCK) as buffer:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                return sum(os.preadv(descriptor, [buffer], block * BLOCK) for block in turn)
            finally:
                os.close(descriptor)

    began = time.perf_counter()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            total = sum(pool.map(read, range(THREADS)))
    except OSError as error:
        raise click.ClickException(
            f"{path} cannot be read past the system's caches (O_DIRECT): {error.strerror}; put "
            "the files on a disk whose file system can, such as ext4 or xfs"
        ) from error
    return total / (time.perf_counter() - began)


def drop_from_memory(paths: Iterable[Path]) -> int:
    """Take files out of the system's memory; return how many bytes of them stayed.

    What a program has mapped and in use stays.

    Raises:
        OSError: a file cannot be read.
    """
    stayed = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not on disk yet would stay too
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        stayed += _in_memory(path)
    return stayed


def _in_memory(path: Path) -> int:
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    pages = np.zeros(-(-len(content) // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(len(content))
    if libc.mincore(address, length, pages.ctypes.data_as(ctypes.c_void_p)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return int((pages & 1).sum()) * mmap.PAGESIZE
