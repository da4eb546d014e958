"""The machine this runs on: what its system says of processor and memory."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "address_space", "available_memory", "this_machine"]

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

    What its control groups have left counts too. Pages of files that are in memory are no
    hindrance: the system drops them.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _fields(ROOT / "proc/meminfo").get("MemAvailable", memory)
    return min([available, *_memory_left()])


def address_space() -> int | None:
    """Return how many bytes this process may still map, files included; None if without a limit.

    Limits are those of `ulimit -v` and `ulimit -d`: what ONNX Runtime maps of files could be
    written in memory, and so counts as data too.
    """
    held = _fields(ROOT / "proc/self/status")
    left = []
    for line in _text(ROOT / "proc/self/limits").splitlines():
        for name, field in (("Max address space", "VmSize"), ("Max data size", "VmData")):
            limit = line.removeprefix(name).split()[:1]
            if line.startswith(name) and limit[0].isdecimal():
                left.append(max(0, int(limit[0]) - held.get(field, 0)))
    return min(left, default=None)


def _fields(path: Path) -> dict[str, int]:
    """Return the lengths in a file of the form "name: 1 kB", in bytes."""
    found = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        match value.split():
            case [number, "kB"] if number.isdecimal():
                found[name] = int(number) * 1024
    return found


def _memory_left() -> Iterator[int]:
    """Return the bytes that each control group has left for this process."""
    # Of version 2, then of version 1, where fields with "total_" count the groups below too.
    for limit_name, held_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in _control_groups("memory"):
            limit, held = _text(folder / limit_name).strip(), _text(folder / held_name).strip()
            if limit.isdecimal() and held.isdecimal():
                kept = int(held) - _file_pages(folder, prefix)
                yield max(0, int(limit) - max(0, kept))


def _file_pages(group: Path, prefix: str) -> int:
    """Return the bytes of files in memory that a control group is charged for.

    Files of a file system in memory are none of them: they cannot be dropped.
    """
    names = (f"{prefix}active_file", f"{prefix}inactive_file")
    pairs = (line.split() for line in _text(group / "memory.stat").splitlines())
    return sum(int(value) for name, value in pairs if name in names)


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
