"""Step 0: what there is to run on."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from export_grok.engines.trt.module import first_gpu
from export_grok.plugins.ptx.source import TARGETS
from scripts.gpu.device import Gpu, gpu_count
from scripts.gpu.step import Options, Outcome

__all__ = ["facts", "installed"]

PACKAGES = (
    *("export-grok", "tensorrt", "tensorrt-rtx", "triton"),
    *("cuda-core", "cuda-bindings", "nccl4py", "onnxruntime", "onnxruntime-gpu", "torch"),
)


def installed(package: str) -> str | None:
    """Return the version of a package as pip wrote it down; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def facts(_options: Options) -> Outcome:
    """Return what there is.

    Raises:
        BuildError: there is no driver, or no GPU.
        MissingDependencyError: `cuda.core` is not installed.
    """
    first_gpu()  # says at once what is missing
    gpu = Gpu()
    memory = gpu.memory()
    packages = {name: found for name in PACKAGES if (found := installed(name)) is not None}
    figures = {
        "name": gpu.name,
        "sm": gpu.sm,
        "gpus": gpu_count(),
        "memory_bytes": memory.total,
        "free_bytes": memory.free,
        "l2_bytes": gpu.l2_bytes,
        "multiprocessors": gpu.multiprocessors,
        "driver": _driver(),
        "cuda": gpu.cuda_version,
        "packages": packages,
    }
    versions = ", ".join(f"{name} {found}" for name, found in packages.items())
    text = (
        f"{gpu.name} (SM{gpu.sm}), {memory.total / 1e9:.0f} GB, {memory.free / 1e9:.0f} free; "
        f"{gpu.multiprocessors} multiprocessors, {gpu.l2_bytes / 1e6:.0f} MB of second-level "
        f"cache; {figures['gpus']} GPUs; driver {figures['driver']}, CUDA {gpu.cuda_version}; "
        f"{versions}"
    )
    if gpu.sm in TARGETS:
        return Outcome(status="pass", text=text, figures=figures)
    known = ", ".join(map(str, TARGETS))
    return Outcome(
        status="fail", text=f"{text}; kernels are compiled for SM {known} only", figures=figures
    )


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module\D*([\d.]+)", file.read_text()) if file.exists() else None
    return found[1] if found else "unknown"
