"""What long work needs, what is there of it, and the refusal where it is not enough."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from export_grok.errors import NeedsError
from export_grok.machine import address_space, available_memory

__all__ = ["Disk", "Needs", "OnNeeds", "room_of"]

MB, GB = 10**6, 10**9
MUCH_BYTES = GB
LONG_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes to be written below a folder, which need not be there yet."""

    folder: Path
    nbytes: int

    @classmethod
    def of_files(cls, folder: Path, lengths: Mapping[str, int]) -> "Disk":
        """Return what files take beyond those that lie there under their names.

        A stage keeps such a file, or removes it before it writes its own.

        Args:
            folder: that they are written to.
            lengths: in bytes, by path below the folder.
        """
        there = sum(min(_length(folder / name), length) for name, length in lengths.items())
        return cls(folder=folder, nbytes=sum(lengths.values()) - there)

    @property
    def free(self) -> int:
        """Bytes that its file system has left for this user; 0 if it cannot be asked."""
        try:
            return shutil.disk_usage(_nearest(self.folder)).free
        except OSError:
            return 0


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a piece of work takes. All of it is counted or estimated before the work begins.

    Attributes:
        disk: what it writes, less what it replaces and what an earlier run has written.
        memory: bytes it holds at once that the system cannot take back; mapped files are not.
        mapped: bytes of files that are mapped at once, which only a limit of the address space
            counts.
        gpu_memory: bytes of each GPU.
        gpus: how many GPUs hold so much.
        gpu_memory_free: what the fullest of these GPUs has. None if that is not known, or there
            are not so many: whoever opens them says that, and what to do.
        seconds: about how long it takes.
    """

    disk: tuple[Disk, ...] = ()
    memory: int = 0
    mapped: int = 0
    gpu_memory: int = 0
    gpus: int = 0
    gpu_memory_free: int | None = None
    seconds: float = 0.0

    def __add__(self, other: "Needs") -> "Needs":
        """Return what two pieces of work need that run one after the other."""
        free = [
            needs.gpu_memory_free for needs in (self, other) if needs.gpu_memory_free is not None
        ]
        return Needs(
            disk=self.disk + other.disk,
            memory=max(self.memory, other.memory),
            mapped=max(self.mapped, other.mapped),
            gpu_memory=max(self.gpu_memory, other.gpu_memory),
            gpus=max(self.gpus, other.gpus),
            gpu_memory_free=min(free, default=None),
            seconds=self.seconds + other.seconds,
        )

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to be done."""
        return self == Needs()

    @property
    def much(self) -> bool:
        """Whether this is worth a word before it begins."""
        nbytes = sum(disk.nbytes for disk in self.disk) + self.memory + self.gpu_memory
        return nbytes >= MUCH_BYTES or self.seconds >= LONG_SECONDS

    def __str__(self) -> str:
        """Return all of it in a line, each with what is there."""
        if self.nothing:
            return "nothing"
        parts = [
            f"{_up(disk.nbytes)} of disk in {disk.folder} ({_down(disk.free)} free)"
            for disk in self._by_device()
            if disk.nbytes
        ]
        if self.memory:
            parts.append(f"{_up(self.memory)} of memory ({_down(available_memory())} available)")
        room = address_space()
        if room is not None and self._addressed:
            parts.append(f"{_up(self._addressed)} of address space ({_down(room)} allowed)")
        if self.gpu_memory:
            free = self.gpu_memory_free
            there = "not known what is free" if free is None else f"{_down(free)} free"
            gpus = "a GPU" if self.gpus == 1 else f"each of {self.gpus} GPUs"
            parts.append(f"{_up(self.gpu_memory)} of {gpus} ({there})")
        return ", ".join([*parts, _duration(self.seconds)])

    def check(self) -> None:
        """Refuse work for which there is too little of something; all of it is named.

        Raises:
            NeedsError: too little disk, memory, address space or GPU memory.
        """
        faults = [
            f"{disk.folder} has {_down(disk.free)} of free disk; "
            f"{_up(disk.nbytes)} are needed: free some, or choose another place"
            for disk in self._by_device()
            if disk.nbytes > disk.free
        ]
        available, room = available_memory(), address_space()
        if self.memory > available:
            faults.append(
                f"{_down(available)} of memory are available; {_up(self.memory)} are needed: end "
                "other programs, raise the limit of the container, or take another machine"
            )
        if room is not None and self._addressed > room:
            faults.append(
                f"{_down(room)} of address space are allowed; {_up(self._addressed)} are needed, "
                "mapped files included: raise the limit (ulimit -v, ulimit -d)"
            )
        free = self.gpu_memory_free
        if free is not None and self.gpu_memory > free:
            gpus = "the GPU has" if self.gpus == 1 else f"one of {self.gpus} GPUs has"
            faults.append(
                f"{gpus} {_down(free)} of free memory; {_up(self.gpu_memory)} are needed: end "
                "what else runs there, or build the engine with a smaller --batch or --max-length"
            )
        if faults:
            raise NeedsError("\n  ".join(["there is too little (--force tries anyhow):", *faults]))

    @property
    def _addressed(self) -> int:
        return self.memory + self.mapped

    def _by_device(self) -> list[Disk]:
        """Return the needs of each file system, under the first folder on it."""
        found: dict[int, Disk] = {}
        for disk in self.disk:
            device = os.stat(_nearest(disk.folder)).st_dev
            before = found.get(device, Disk(folder=disk.folder, nbytes=0))
            found[device] = dataclasses.replace(before, nbytes=before.nbytes + disk.nbytes)
        return list(found.values())


# What a stage hands its needs to, once its input is checked and before it writes or loads
# anything. It may raise, and nothing was done then.
OnNeeds = Callable[[Needs], None]


def room_of(path: Path) -> int:
    """Return the bytes that a file takes of its disk: fewer than its length, if it has holes.

    Raises:
        OSError: it cannot be asked.
    """
    found = path.stat()
    blocks: int | None = getattr(found, "st_blocks", None)  # which not every system tells
    return found.st_size if blocks is None else 512 * blocks


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest above it that is there."""
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _up(nbytes: int) -> str:
    """Return what is needed, rounded up: so it never reads like less than what is there."""
    if nbytes < GB:
        return f"{-(-nbytes // MB)} MB"
    return f"{-(-nbytes // (GB // 10)) / 10:.1f} GB"


def _down(nbytes: int) -> str:
    """Return what is there, rounded down."""
    if nbytes < GB:
        return f"{nbytes // MB} MB"
    return f"{nbytes // (GB // 10) / 10:.1f} GB"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    if seconds < 100:
        return f"about {seconds:.0f} s"
    if seconds < 6000:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"
