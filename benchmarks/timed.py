"""Run a command as a user would, and print what it took."""

import os
import time
from collections.abc import Sequence

__all__ = ["timed"]


def timed(label: str, command: Sequence[str]) -> None:
    """Run `command` and print its time and the peak of its memory, mapped files included.

    Raises:
        SystemExit: the command failed.
    """
    began = time.perf_counter()
    process = os.posix_spawn(command[0], command, os.environ)
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"{label} failed with status {status}")
    print(f"{label:24} {seconds:8.1f} s   peak {usage.ru_maxrss / 1e6:6.2f} GB", flush=True)
