"""What long work needs, what is there of it, and the refusal where it is not enough."""

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from export_grok.errors import NeedsError
from export_grok.machine import available_memory

__all__ = ["Disk", "Needs"]

GB = 10**9
MUCH_BYTES = GB
LONG_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes to be written below a folder, which need not be there yet."""

    folder: Path
    nbytes: int

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
        gpu_memory: bytes of each GPU.
        gpus: how many GPUs hold so much.
        gpu_memory_free: what the fullest of these GPUs has; None if there are none, or not enough.
        seconds: about how long it takes.
    """

    disk: tuple[Disk, ...] = ()
    memory: int = 0
    gpu_memory: int = 0
    gpus: int = 0
    gpu_memory_free: int | None = None
    seconds: float = 0.0

    def __add__(self, other: "Needs") -> "Needs":
        """Return what two pieces of work need that run one after the other."""
        return dataclasses.replace(
            self,
            disk=self.disk + other.disk,
            memory=max(self.memory, other.memory),
            gpu_memory=max(self.gpu_memory, other.gpu_memory),
            gpus=max(self.gpus, other.gpus),
            gpu_memory_free=(
                self.gpu_memory_free if other.gpu_memory_free is None else other.gpu_memory_free
            ),
            seconds=self.seconds + other.seconds,
        )

    @property
    def much(self) -> bool:
        """Whether this is worth a word before it begins."""
        nbytes = sum(disk.nbytes for disk in self.disk) + self.memory + self.gpu_memory
        return nbytes >= MUCH_BYTES or self.seconds >= LONG_SECONDS

    def __str__(self) -> str:
        """Return all of it in a line, each with what is there."""
        parts = [
            f"{disk.nbytes / GB:.1f} GB of disk in {disk.folder} ({disk.free / GB:.1f} GB free)"
            for disk in self._by_device()
            if disk.nbytes
        ]
        if self.memory:
            parts.append(
                f"{self.memory / GB:.1f} GB of memory ({available_memory() / GB:.1f} GB available)"
            )
        if self.gpu_memory:
            free = self.gpu_memory_free
            there = "there are not so many" if free is None else f"{free / GB:.1f} GB free"
            gpus = "a GPU" if self.gpus == 1 else f"each of {self.gpus} GPUs"
            parts.append(f"{self.gpu_memory / GB:.1f} GB of {gpus} ({there})")
        parts.append(_duration(self.seconds))
        return ", ".join(parts)

    def check(self) -> None:
        """Refuse work for which there is too little of something; all of it is named.

        Raises:
            NeedsError: too little disk, memory or GPU memory.
        """
        faults = [
            f"{disk.folder} has {disk.free / GB:.1f} GB of free disk; "
            f"{disk.nbytes / GB:.1f} GB are needed: free some, or choose another place"
            for disk in self._by_device()
            if disk.nbytes > disk.free
        ]
        available = available_memory()
        if self.memory > available:
            faults.append(
                f"{available / GB:.1f} GB of memory are available; {self.memory / GB:.1f} GB are "
                "needed: end other programs, raise the limit of the container, or take another "
                "machine"
            )
        free = self.gpu_memory_free
        if self.gpu_memory and (free is None or self.gpu_memory > free):
            has = "are not there" if free is None else f"have {free / GB:.1f} GB free"
            faults.append(
                f"{self.gpus} GPUs with {self.gpu_memory / GB:.1f} GB each are needed; they {has}"
            )
        if faults:
            raise NeedsError("\n  ".join(["there is too little (--force tries anyhow):", *faults]))

    def _by_device(self) -> list[Disk]:
        """Return the needs of each file system, under the first folder on it."""
        found: dict[int, Disk] = {}
        for disk in self.disk:
            device = os.stat(_nearest(disk.folder)).st_dev
            before = found.get(device, Disk(folder=disk.folder, nbytes=0))
            found[device] = dataclasses.replace(before, nbytes=before.nbytes + disk.nbytes)
        return list(found.values())


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest above it that is there."""
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    if seconds < 100:
        return f"about {seconds:.0f} s"
    if seconds < 6000:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"
