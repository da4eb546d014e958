"""A control group of Linux whose processes, and the files they read, get only so much memory."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

__all__ = ["MemoryGroup", "memory_group"]

MOUNTED = Path("/sys/fs/cgroup")
# Files of version 1, then of version 2: the limit, what may be swapped out and how much that is,
# and the most that was used.
FILES = (
    ("memory.limit_in_bytes", "memory.swappiness", "memory.max_usage_in_bytes"),
    ("memory.max", "memory.swap.max", "memory.peak"),
)
PATIENCE = 5.0


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """A group that is there.

    Attributes:
        folder: of the group.
        version: of control groups, 1 or 2.
    """

    folder: Path
    version: int

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` in the group, from its first byte on."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", enter, str(self.folder / "cgroup.procs"), *command]

    def most_used(self) -> int | None:
        """Return the most memory that was in use, in bytes; None where the system keeps none."""
        try:
            return int((self.folder / FILES[self.version - 1][2]).read_text())
        except FileNotFoundError:  # version 2 before Linux 5.19
            return None


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Make a group whose processes get `limit` bytes, without swap; remove it after the block.

    Whatever runs in it must have ended by then.

    Raises:
        ClickException: this system or this user cannot make one.
    """
    parent, version = _parent()
    group = MemoryGroup(folder=parent / f"export-grok-{os.getpid()}", version=version)
    most, swap, _ = FILES[version - 1]
    try:
        try:
            group.folder.mkdir()
            (group.folder / most).write_text(str(limit))
            if (group.folder / swap).exists():
                (group.folder / swap).write_text("0")
        except OSError as error:
            raise click.ClickException(
                f"cannot make a control group for memory, {group.folder}: {error.strerror}; run "
                "as root, and in a container with leave to write in /sys/fs/cgroup"
            ) from error
        yield group
    finally:
        _remove(group.folder)


def _parent() -> tuple[Path, int]:
    """Return the group to make one in, and the version.

    Raises:
        ClickException: there is none.
    """
    unified = None
    with contextlib.suppress(FileNotFoundError):  # another system than Linux
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                own = MOUNTED / "memory" / path.lstrip("/")
                # A container may see its own group as the outermost one.
                return (own if own.is_dir() else MOUNTED / "memory"), 1
            if not controllers:
                unified = MOUNTED / path.lstrip("/")
    # A group that has processes can have no groups with limits in it: one further out can.
    for group in (unified, *unified.parents) if unified else ():
        enabled = group / "cgroup.subtree_control"
        if enabled.is_file() and "memory" in enabled.read_text().split():
            return group, 2
    raise click.ClickException(
        f"no control group below {MOUNTED} can limit memory; this needs Linux, and with control "
        "groups of version 2 a group that has `memory` in its cgroup.subtree_control"
    )


def _remove(folder: Path) -> None:
    """Remove a group. The last process may still be leaving it."""
    ends = time.monotonic() + PATIENCE
    while folder.exists():
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > ends:
                raise click.ClickException(
                    f"{folder} cannot be removed: {error.strerror}; end what runs in it "
                    f"(cgroup.procs), then: rmdir {folder}"
                ) from error
            time.sleep(0.05)
