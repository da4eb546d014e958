"""Processes, by their numbers."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["children", "gone", "soon"]


def gone(pid: int) -> bool:
    """Return whether there is no such process; one that waits to be reaped by nobody is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, parent = stat.rpartition(")")[2].split()[:2]
    return state == "Z" and parent == "1"


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def soon(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until something is true; return whether it was in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return true()
