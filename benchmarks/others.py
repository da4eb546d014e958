"""What other programs take of the processor while something is measured here."""

import os
import time
from pathlib import Path
from types import TracebackType

__all__ = ["MOST", "Others"]

# More cores than this make figures doubtful.
MOST = 0.1


class Others:
    """Watches while the block runs.

    Attributes:
        cores: that other programs took on average, here or beside this virtual machine.
    """

    def __init__(self) -> None:
        self.cores = 0.0

    def __enter__(self) -> "Others":
        self._began = time.perf_counter(), _busy_seconds(), time.process_time()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        began, busy, own = self._began
        others = (_busy_seconds() - busy) - (time.process_time() - own)
        self.cores = max(0.0, others / (time.perf_counter() - began))


def _busy_seconds() -> float:
    """Return how long all cores were busy, or taken from this machine, until now."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
