"""ptxas, NVIDIA's assembler: whether it takes a kernel's PTX, and what the kernel then needs."""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from export_grok.errors import BuildError, MissingDependencyError

__all__ = ["Assembled", "assembled", "find_ptxas", "ptxas_version", "read_report"]


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """What a kernel needs, as ptxas reports it.

    Attributes:
        registers: of a thread.
        spills: bytes that a thread stores and loads, together, for want of registers.
        stack: bytes of a thread's own memory.
        shared_bytes: of a block, as far as the PTX itself fixes them.
    """

    registers: int
    spills: int
    stack: int
    shared_bytes: int


def find_ptxas() -> Path:
    """Return the ptxas to use: the one in Triton's package, or else one on PATH.

    Triton's comes with its version, so that figures are the same on every machine. It has two;
    `ptxas` is the older one (CUDA 12.9): what it takes, every driver takes that TensorRT 11 runs
    with.

    Raises:
        MissingDependencyError: there is none.
    """
    triton = importlib.util.find_spec("triton")
    for folder in (triton and triton.submodule_search_locations) or ():
        own = Path(folder, "backends", "nvidia", "bin", "ptxas")
        if own.exists():
            return own
    found = shutil.which("ptxas")
    if found is None:
        raise MissingDependencyError(
            "there is no ptxas, neither in Triton's package nor on PATH. "
            'Install it with: pip install "export-grok[triton]"'
        )
    return Path(found)


@functools.cache
def ptxas_version(path: Path) -> str:
    """Return the version of CUDA that a ptxas belongs to, e.g. "12.9.86"."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"V(\d+(\.\d+)+)", said)
    return found[1] if found else "unknown"


def assembled(ptx: str, kernel: str, target: str) -> Assembled:
    """Return what a kernel needs once it is assembled.

    Args:
        ptx: of one kernel.
        kernel: its name, for messages.
        target: e.g. "sm_90a".

    Raises:
        BuildError: ptxas refuses it.
        MissingDependencyError: there is no ptxas.
    """
    ptxas = find_ptxas()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "kernel.ptx")
        text.write_text(ptx)
        run = subprocess.run(
            [ptxas, "-v", "--gpu-name", target, "-o", Path(folder, "cubin"), text],
            capture_output=True,
            text=True,
            check=False,
        )
    said = run.stdout + run.stderr
    if run.returncode:
        raise BuildError(
            f"ptxas {ptxas_version(ptxas)} ({ptxas}) refuses kernel {kernel} for {target}:\n"
            f"{said.strip()}"
        )
    return read_report(said, kernel)


def read_report(said: str, kernel: str) -> Assembled:
    """Return the figures in what `ptxas -v` wrote of one kernel.

    Raises:
        BuildError: a figure is not there.
    """
    registers = re.search(r"Used (\d+) registers", said)
    memory = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said
    )
    if registers is None or memory is None:
        raise BuildError(
            f"ptxas does not say what registers kernel {kernel} uses, or what it spills:\n"
            f"{said.strip()}"
        )
    shared = re.search(r"(\d+) bytes smem", said)
    stack, stores, loads = map(int, memory.groups())
    return Assembled(
        registers=int(registers[1]),
        spills=stores + loads,
        stack=stack,
        shared_bytes=int(shared[1]) if shared else 0,
    )
