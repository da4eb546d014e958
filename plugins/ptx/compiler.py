"""Kernels of plugin nodes as PTX that TensorRT's launcher can call, compiled without a GPU.

A kernel goes from Triton through `entry_point`, which holds it to the arguments that TensorRT
passes, and through `ptxas`, which shows that it assembles. What comes out is kept on the disk.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from export_grok.errors import BuildError
from export_grok.machine import this_machine
from export_grok.plugins.plugin_node import Call, PluginNode
from export_grok.plugins.ptx.compiled_kernel import CompiledKernel, keep, kept
from export_grok.plugins.ptx.entry_point import declared_only
from export_grok.plugins.ptx.ptxas import assembled
from export_grok.plugins.ptx.source import KernelSource, files_hash, kernel_source
from export_grok.progress import progress_bar

__all__ = ["SHARED_LIMIT", "CompiledKernel", "compile_all", "compiled", "kernel_hash"]

# More, in bytes a block, must be asked of the driver for each kernel; nothing says that TensorRT's
# launcher does.
SHARED_LIMIT = 48 << 10

# A kernel takes seconds; what takes so long hangs.
TIMEOUT_SECONDS = 600

# What these begin speaks to Triton, LLVM or ptxas.
COMPILERS_VARIABLES = ("TRITON_", "MLIR_", "LLVM_", "NVPTX_", "PTXAS_", "DISABLE_", "USE_IR_LOC")


def kernel_hash(node: PluginNode, call: Call, sm: int) -> str:
    """Return the hash of all that the compiled kernel depends on; nothing is compiled.

    It is over the text of the kernel's module and of ours that it imports, the arguments' types
    and hints, the constants, warps, stages, the target with its PTX version, and Triton's version.

    Raises:
        ConfigError: kernels are not compiled for this architecture.
        BuildError: the op has no kernels.
        MissingDependencyError: Triton is not installed.
    """
    return kernel_source(node, call, sm).hash


def compiled(node: PluginNode, call: Call, sm: int) -> CompiledKernel:
    """Return the kernel of `node`, compiled for a call; from the disk if it is there.

    Args:
        node: plugin node.
        call: shapes, attributes and dtypes.
        sm: architecture, e.g. 90.

    Raises:
        ConfigError: kernels are not compiled for this architecture.
        BuildError: it does not compile or assemble, or TensorRT's launcher could not call it.
        MissingDependencyError: Triton, or ptxas, is not installed.
    """
    return compile_all([(node, call, sm)])[0]


def compile_all(calls: Iterable[tuple[PluginNode, Call, int]]) -> list[CompiledKernel]:
    """Return the kernels of many calls in their order; several are compiled at a time.

    Raises:
        As `compiled`.
    """
    sources = [kernel_source(*call) for call in calls]
    by_hash = {source.hash: source for source in sources}
    kernels = {key: kernel for key in by_hash if (kernel := kept(key)) is not None}
    missing = [source for key, source in by_hash.items() if key not in kernels]
    if missing:
        workers = min(len(missing), this_machine().cores)
        with (
            progress_bar("kernels", len(missing), unit="kernel") as advance,
            ThreadPoolExecutor(workers) as pool,
        ):
            running = [pool.submit(_made, source) for source in missing]
            try:
                for done in as_completed(running):
                    kernel = done.result()
                    kernels[kernel.hash] = kernel
                    advance(1)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [kernels[source.hash] for source in sources]


def _made(source: KernelSource) -> CompiledKernel:
    made = _by_triton(source)
    if files_hash(source.module) != source.files:
        raise BuildError(
            f"{source.path} changed while kernel {source.kernel} was compiled; start again"
        )
    for name, length in made["scratch"].items():
        if length:
            raise BuildError(
                f"kernel {source.kernel} needs {length} bytes of {name} for {source.target.name}; "
                "TensorRT gives a kernel no memory: make it an output of the node"
            )
    types = [kind for _, kind in source.arguments]
    ptx = declared_only(made["ptx"], source.kernel, types, threads=32 * made["num_warps"])
    needs = assembled(ptx, source.kernel, source.target.name)
    shared = made["shared"] + needs.shared_bytes
    if shared > SHARED_LIMIT:
        raise BuildError(
            f"a block of kernel {source.kernel} needs {shared} bytes of shared memory for "
            f"{source.target.name}; it must be {SHARED_LIMIT} at the most, as TensorRT is not "
            "known to ask the driver for more: choose smaller blocks, or fewer stages"
        )
    kernel = CompiledKernel(
        name=source.kernel,
        ptx=ptx,
        target=source.target.name,
        parameters=len(types),
        scalars=source.scalars,
        num_warps=made["num_warps"],
        shared_bytes=made["shared"],
        static_shared_bytes=needs.shared_bytes,
        registers=needs.registers,
        spills=needs.spills,
        stack=needs.stack,
        hash=source.hash,
    )
    keep(kernel)
    return kernel


def _by_triton(source: KernelSource) -> dict[str, Any]:
    """Return what `ptx.child` writes; it runs as a program of its own, which may die."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "source.json").write_text(json.dumps(source.to_dict()))
        try:
            run = subprocess.run(
                [sys.executable, "-m", "export_grok.plugins.ptx.child", folder],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=TIMEOUT_SECONDS,
                env=_environment(folder),
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(
                f"kernel {source.kernel} was not compiled for {source.target.name} within "
                f"{TIMEOUT_SECONDS} s"
            ) from error
        if run.returncode:
            end = "" if run.returncode > 0 else f" ({signal.Signals(-run.returncode).name})"
            raise BuildError(
                f"kernel {source.kernel} does not compile for {source.target.name}{end}:\n"
                f"{run.stderr.strip()}"
            )
        made: dict[str, Any] = json.loads(Path(folder, "kernel.json").read_text())
        return made


def _environment(folder: str) -> dict[str, str]:
    """Return our own without what is said to the compilers: it is not in the hash."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(COMPILERS_VARIABLES)
    }
    # No line numbers: with them PTX holds the path of this installation.
    return ours | {"TRITON_CACHE_DIR": folder, "TRITON_DISABLE_LINE_INFO": "1"}
