"""The machine this runs on: what its system says of processor and memory."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "available_memory", "this_machine"]

# A test has files of its own in its place.
ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to compute with.

    Attributes:
        system: name, release and architecture, e.g. "Linux 6.1.0 x86_64".
        cpu: the processor's model.
        cores: that this process may run on.
        core_limit: cores' worth of time that its control group gets; None if no fewer.
        memory: of the machine, in bytes.
        memory_limit: of its control group, in bytes; None if no lower.
    """

    system: str
    cpu: str
    cores: int
    core_limit: float | None = None
    memory: int
    memory_limit: int | None = None


def this_machine() -> Machine:
    """Return the machine of this process."""
    cores = _cores()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    core_limit = min(_core_limits(), default=float(cores))
    memory_limit = min(_memory_limits(), default=memory)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu(),
        cores=cores,
        core_limit=core_limit if core_limit < cores else None,
        memory=memory,
        memory_limit=memory_limit if memory_limit < memory else None,
    )


def available_memory() -> int:
    """Return how many bytes this process may still take without the system swapping or killing.

    What its control groups have left counts too; pages of files in memory are no hindrance.
    """
    machine = this_machine()
    available = machine.memory
    for line in _text(ROOT / "proc/meminfo").splitlines():
        name, _, text = line.partition(":")
        if name == "MemAvailable":
            available = int(text.split()[0]) * 1024
    return min([available, *_memory_left()])


def _memory_left() -> Iterator[int]:
    for folder in _control_groups("memory"):
        for limit_name, held in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _text(folder / limit_name).strip(), _text(folder / held).strip()
            if limit.isdecimal() and used.isdecimal():
                yield max(0, int(limit) - int(used) + _file_pages(folder))


def _file_pages(group: Path) -> int:
    """Return the bytes of files in memory that a control group is charged for."""
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("file", "cache"):
            return int(value)
    return 0


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    for line in _text(ROOT / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _memory_limits() -> Iterator[int]:
    for folder in _control_groups("memory"):
        # The first is of version 2, where no limit is "max"; in version 1 that is 2**63 or so.
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name).strip()
            if text.isdecimal():
                yield int(text)


def _core_limits() -> Iterator[float]:
    for folder in _control_groups("cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        quota, period = quota.strip(), period.strip()  # without a limit "max", or -1
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)


def _control_groups(controller: str) -> Iterator[Path]:
    """Return the folders of the group of this process and of those around it."""
    mounted = ROOT / "sys/fs/cgroup"
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tree = mounted
        elif controller in controllers.split(","):
            tree = mounted / controller
        else:
            continue
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            yield tree / part


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or a container that shows less
        return ""
