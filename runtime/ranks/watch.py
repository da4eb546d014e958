"""Tells a rank that works from one that stalls, by what the system counts of its process."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["PATIENCE", "Activity", "Patience", "Watch", "activity"]

PROC = Path("/proc")
# Of /proc/PID/stat, counted from the state, which follows the name: proc(5).
STATE, MAJOR_FAULTS, USER_TIME, SYSTEM_TIME = 0, 9, 11, 12


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a rank is waited for.

    Attributes:
        stall: seconds in which it may do nothing: neither compute nor get a page from a disk.
        deadline: seconds until its next message, whatever it does.
    """

    stall: float = 8.0
    deadline: float = 600.0


PATIENCE = Patience()


@dataclass(frozen=True)
class Activity:
    """What the system counts of a process: it grows as long as the process does anything.

    Attributes:
        stopped: whether a signal holds it.
        ticks: of processor time.
        major_faults: pages that it waited for.
    """

    stopped: bool
    ticks: int
    major_faults: int


def activity(pid: int) -> Activity | None:
    """Return what a process did until now; None if it is no more."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return Activity(
        stopped=fields[STATE] in ("T", "t"),
        ticks=int(fields[USER_TIME]) + int(fields[SYSTEM_TIME]),
        major_faults=int(fields[MAJOR_FAULTS]),
    )


class Watch:
    """Looks at a process that is waited for, again and again.

    Args:
        pid: of the process.
        patience: to have.
        now: when the waiting began, in seconds of any clock.
    """

    def __init__(self, pid: int, patience: Patience, now: float) -> None:
        self._pid = pid
        self._patience = patience
        self._began = self._moved = now
        self._seen = activity(pid)

    @property
    def stopped(self) -> bool:
        """Whether a signal held it at the last look."""
        return self._seen is not None and self._seen.stopped

    def complaint(self, now: float) -> str | None:
        """Return what is wrong with the process, if it is late by now; None to wait on."""
        seen = activity(self._pid)
        if _moved(self._seen, seen):
            self._moved = now
        self._seen = seen
        if now - self._moved >= self._patience.stall:
            held = " (a signal stopped it)" if self.stopped else ""
            return f"stalled{held}: it did nothing for {self._patience.stall:.3g} s"
        if now - self._began >= self._patience.deadline:
            return f"did not come in {self._patience.deadline:.3g} s, though it computes"
        return None


def _moved(before: Activity | None, now: Activity | None) -> bool:
    if before is None or now is None:
        return True  # a process that is no more is found by its closed socket
    return (before.ticks, before.major_faults) != (now.ticks, now.major_faults)
