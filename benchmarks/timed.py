"""Run a command as a user would, and print what it took."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence

__all__ = ["timed"]

SAMPLE_SECONDS = 0.05


def timed(label: str, command: Sequence[str]) -> None:
    """Run `command` and print its time and the peak of its memory, with and without mapped files.

    The second is sampled: memory of its own that the system cannot take back.

    Raises:
        SystemExit: the command failed.
    """
    began = time.perf_counter()
    process = os.posix_spawn(command[0], command, os.environ)
    over, own = threading.Event(), [0]

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            own.append(_own_memory(process))

    sampling = threading.Thread(target=sample)
    sampling.start()
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - began
    over.set()
    sampling.join()
    if status:
        raise SystemExit(f"{label} failed with status {status}")
    print(
        f"{label:34} {seconds:8.1f} s   peak {usage.ru_maxrss / 1e6:6.2f} GB, "
        f"own {max(own) / 1e9:5.2f} GB",
        flush=True,
    )


def _own_memory(process: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{process}/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0
