"""A compiled kernel, and the file it is kept in, under the hash of all it depends on.

Files lie in `$XDG_CACHE_HOME/export-grok/kernels`, or else in `~/.cache/export-grok/kernels`. Each
has a checksum: one that is not what was written counts for nothing.
"""

import dataclasses
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from export_grok.errors import OutputError
from export_grok.files import atomic_file, output_errors

__all__ = ["CompiledKernel", "file_of", "keep", "kept"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel that takes pointers to inputs, int32 scalars, and pointers to outputs.

    Attributes:
        name: of the entry point.
        ptx: text.
        target: it is for, e.g. "sm_90a".
        parameters: how many it takes, in this order.
        scalars: names of the int32 ones, in their order.
        num_warps: 32 threads each; a block has no more and no fewer.
        shared_bytes: shared memory that the launcher must give a block.
        static_shared_bytes: shared memory that a block has beside that.
        registers: of a thread.
        spills: bytes that a thread stores and loads, together, for want of registers.
        stack: bytes of a thread's own memory.
        hash: `kernel_hash` of what it was compiled from.
    """

    name: str
    ptx: str
    target: str
    parameters: int
    scalars: tuple[str, ...]
    num_warps: int
    shared_bytes: int
    static_shared_bytes: int
    registers: int
    spills: int
    stack: int
    hash: str

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.num_warps


def file_of(key: str) -> Path:
    """Return where the kernel with this hash is kept."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "export-grok" / "kernels" / f"{key}.json"


def kept(key: str) -> CompiledKernel | None:
    """Return the kernel on the disk, if there is one and it is what was written."""
    try:
        entry = json.loads(file_of(key).read_bytes())
        kernel = CompiledKernel(**entry["kernel"] | {"scalars": tuple(entry["kernel"]["scalars"])})
        if entry["checksum"] == _checksum(kernel) and kernel.hash == key:
            return kernel
    except FileNotFoundError:
        return None
    except (OSError, RecursionError, ValueError, TypeError, LookupError):
        pass
    logger.warning("%s is damaged: the kernel is compiled again", file_of(key))
    return None


def keep(kernel: CompiledKernel) -> None:
    """Write the kernel to the disk; where that cannot be, it is compiled again next time."""
    file = file_of(kernel.hash)
    entry = {"checksum": _checksum(kernel), "kernel": dataclasses.asdict(kernel)}
    try:
        with output_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as out:
            out.write(json.dumps(entry, indent=1).encode())
    except OutputError as error:  # the kernel is there all the same
        logger.warning("kernel %s is not kept: %s", kernel.name, error)


def _checksum(kernel: CompiledKernel) -> str:
    text = json.dumps(dataclasses.asdict(kernel), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
