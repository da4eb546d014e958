"""The compiled CPU kernels of the ops: whether there are any, and which instructions they use.

One library holds the ONNX Runtime kernels of all ops. pip compiles it where there is a compiler;
where there is none, or the library does not load, ops run by what ONNX Runtime has built in. Two
environment variables say otherwise:

    EXPORT_GROK_KERNELS   native: no fallback, an error instead; builtin: the library is not used
    EXPORT_GROK_ISA       the instruction set, one of `Kernels.supported`
"""

import ctypes
import functools
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from export_grok.errors import ConfigError

__all__ = ["Kernels", "native_kernels", "read_streams"]

CHOICE = "EXPORT_GROK_KERNELS"
ISA = "EXPORT_GROK_ISA"
# The version of ONNX Runtime's C API that the library asks for: that of 1.24.
API_VERSION = 24


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What this process has.

    Attributes:
        library: the compiled library; None if the kernels built into ONNX Runtime are used.
        isa: instruction set that its kernels use; None without a library.
        supported: instruction sets that the library has and this CPU too, the best first.
        reason: why it is so, in a sentence.
    """

    library: Path | None = None
    isa: str | None = None
    supported: tuple[str, ...] = ()
    reason: str


def native_kernels() -> Kernels:
    """Return what this process has; looked for once for each setting of the variables.

    Raises:
        ConfigError: a variable has an unknown value, or native kernels are asked for and there are
            none.
    """
    choice, isa = os.environ.get(CHOICE, ""), os.environ.get(ISA, "")
    if choice not in ("", "native", "builtin"):
        raise ConfigError(f"{CHOICE} is {choice!r}; it must be native, builtin or unset")
    found = _found(choice, isa)
    if choice == "native" and found.library is None:
        raise ConfigError(f"{CHOICE} is native, but {found.reason}")
    if found.library is not None:
        _loaded(found.library).grok1_select(str(found.isa).encode())
    return found


def read_streams(data: NDArray[Any]) -> None:
    """Read all bytes of an array once, in four streams, with the calling thread.

    Raises:
        ConfigError: there are no native kernels.
    """
    found = native_kernels()
    if found.library is None:
        raise ConfigError(found.reason)
    _loaded(found.library).grok1_read_streams(data.ctypes.data, data.nbytes)


@functools.cache
def _found(choice: str, isa: str) -> Kernels:
    if choice == "builtin":
        return Kernels(reason=f"{CHOICE} is builtin")
    runtime = _runtime_version()
    if runtime is not None and runtime < (1, API_VERSION):
        return Kernels(
            reason=f"they need ONNX Runtime 1.{API_VERSION} or later, and "
            f"{runtime[0]}.{runtime[1]} is installed; upgrade it: pip install -U onnxruntime"
        )
    libraries = sorted(Path(__file__).parent.glob("ort_kernels*.so"))
    if not libraries:
        return Kernels(
            reason="they were not compiled: install a C++ compiler (g++ or clang++), then "
            "export-grok again"
        )
    path = libraries[0]
    try:
        library = _loaded(path)
    except (OSError, AttributeError) as error:
        return Kernels(
            reason=f"{path} does not load here: it was compiled for another machine, or is "
            f"damaged ({error}); install export-grok again"
        )
    supported = tuple(library.grok1_supported().decode().split())
    if isa and isa not in supported:
        raise ConfigError(f"{ISA} is {isa!r}; this CPU and library have {', '.join(supported)}")
    return Kernels(
        library=path,
        isa=isa or supported[0],
        supported=supported,
        reason=f"{ISA} is {isa}" if isa else "the best that this CPU has",
    )


def _runtime_version() -> tuple[int, int] | None:
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            major, minor = version(package).split(".")[:2]
        except PackageNotFoundError:
            continue
        return int(major), int(minor)
    return None


@functools.cache
def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.grok1_supported.restype = ctypes.c_char_p
    library.grok1_select.argtypes = [ctypes.c_char_p]
    library.grok1_read_streams.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.grok1_read_streams.restype = ctypes.c_uint64
    return library
