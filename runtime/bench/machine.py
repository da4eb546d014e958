"""Cores, caches and memory, as the system tells of them; None where it does not."""

import os
import resource
import threading
import time
from pathlib import Path
from types import TracebackType

from export_grok.runtime.ranks.watch import activity
from export_grok.runtime.ranks.worker import PROGRAM

__all__ = ["PeakMemory", "cache_bytes", "cores", "pages_from_disk", "process_time"]

STATUS = Path("/proc/self/status")
PROC = Path("/proc")
CPUS = Path("/sys/devices/system/cpu")
INTERVAL = 0.01


class PeakMemory:
    """The most memory this process and its ranks have while the block runs.

    It is looked at every 10 ms.

    Attributes:
        private: bytes of its own (RssAnon); None where the system does not say.
        mapped: bytes of mapped files that are in memory (RssFile), likewise.
    """

    def __init__(self) -> None:
        self.private: int | None = None
        self.mapped: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._look()

    def _look(self) -> None:
        found = [_status(STATUS), *(_status(PROC / str(pid) / "status") for pid in _ranks())]
        for name, field in (("private", "RssAnon"), ("mapped", "RssFile")):
            lengths = [status[field] for status in found if field in status]
            if lengths:
                setattr(self, name, max(getattr(self, name) or 0, sum(lengths)))


def cores() -> int:
    """Return how many cores this process may use; the threads of one core count once.

    It is how many threads ONNX Runtime takes by itself.
    """
    siblings = (CPUS / f"cpu{cpu}/topology/thread_siblings_list" for cpu in _cpus())
    return len({_text(path) or str(path) for path in siblings})


def cache_bytes() -> int | None:
    """Return the length of the last-level caches of those cores, one that is shared once."""
    found: dict[tuple[int, str], int] = {}
    for cpu in _cpus():
        for cache in (CPUS / f"cpu{cpu}/cache").glob("index*"):
            level, size = _text(cache / "level"), _text(cache / "size")
            if level.isdecimal() and size.endswith("K") and size[:-1].isdecimal():
                found[int(level), _text(cache / "shared_cpu_list")] = int(size[:-1]) << 10
    last = max((level for level, _ in found), default=None)
    return sum(size for (level, _), size in found.items() if level == last) or None


def pages_from_disk() -> int:
    """Return how many pages this process and its ranks had to wait for until now."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return own + sum(did.major_faults for pid in _ranks() if (did := activity(pid)))


def process_time() -> float:
    """Return the processor seconds of this process and, in ticks of 10 ms, of its ranks."""
    ticks = sum(did.ticks for pid in _ranks() if (did := activity(pid)))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _ranks() -> list[int]:
    """Return the ranks among the processes that this one started."""
    children = (PROC / "self/task").glob("*/children")
    pids = [int(pid) for path in children for pid in _text(path).split()]
    return [pid for pid in pids if PROGRAM in _text(PROC / str(pid) / "cmdline").split("\0")]


def _cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _status(path: Path) -> dict[str, int]:
    """Return the lines of a process's status that are lengths, in bytes."""
    lines = [line.split() for line in _text(path).splitlines()]
    return {
        words[0].rstrip(":"): int(words[1]) << 10
        for words in lines
        if len(words) == 3 and words[2] == "kB"
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
