"""The two packages that build plans, and the GPUs each can build for."""

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, cast

from export_grok.engines.trt.api import TensorRT
from export_grok.errors import BuildError, ConfigError, MissingDependencyError
from export_grok.optional import require

__all__ = ["FLAVOURS", "Flavour", "Gpu", "first_gpu", "flavour_of"]

# Activations are bfloat16, which GPUs have from Ampere on. TensorRT-RTX for SM75: "Cannot compile
# for target(s) sm75, because the model contains HW-specific datatypes: b16".
FIRST_BFLOAT16: Final = 80
# Numbers of CUdevice_attribute (source: cuda.h).
MAJOR, MINOR = 75, 76
_OTHER: Final = "--backend trt-rtx builds on a CPU"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU: its name, and its compute capability without the point, e.g. 90."""

    name: str
    sm: int


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """One of the two packages.

    Attributes:
        backend: its name on the command line.
        package: to import.
        extra: of export-grok, which brings it.
        any_gpu: whether it builds without a GPU, for any that it supports; else it builds for the
            GPU at hand, which it times kernels on.
        keeps_timings: whether what it timed can be kept for the next build.
    """

    backend: str
    package: str
    extra: str
    any_gpu: bool
    keeps_timings: bool

    def load(self) -> TensorRT:
        """Return the package.

        Raises:
            BuildError: it needs a GPU and there is none.
            MissingDependencyError: it is not installed.
        """
        if self.any_gpu:
            return cast(TensorRT, require(self.package, extra=self.extra))
        self._gpu()  # before the package: without a GPU it is of no use
        try:
            return cast(TensorRT, require(self.package, extra=self.extra))
        except MissingDependencyError as error:
            raise MissingDependencyError(f"{error}; {_OTHER}") from error

    def version(self) -> str:
        """Return the package's version. A plan runs in no other.

        Raises:
            BuildError, MissingDependencyError: as `load`.
        """
        return self.load().__version__

    def architectures(self) -> tuple[int, ...]:
        """Return the compute capabilities, without the point, that it builds for here.

        Raises:
            BuildError, MissingDependencyError: as `load`.
            ConfigError: the GPU at hand is too old.
        """
        if not self.any_gpu:
            gpu = self._gpu()
            if gpu.sm < FIRST_BFLOAT16:
                raise ConfigError(
                    f"{gpu.name} is SM{gpu.sm}, which has no bfloat16; a GPU from "
                    f"SM{FIRST_BFLOAT16} on has"
                )
            return (gpu.sm,)
        named = map(re.compile(r"SM(\d+)").fullmatch, self.load().ComputeCapability.__members__)
        sms = sorted(int(match[1]) for match in named if match)
        return tuple(sm for sm in sms if sm >= FIRST_BFLOAT16)

    def check_architectures(self, sms: Iterable[int]) -> None:
        """Hold architectures to those that can be built for here.

        Raises:
            BuildError, MissingDependencyError: as `load`.
            ConfigError: one of them cannot be built for.
        """
        wrong = [sm for sm in sms if sm not in self.architectures()]
        if not wrong:
            return
        asked = ", ".join(f"SM{sm}" for sm in wrong)
        allowed = ",".join(str(sm) for sm in self.architectures())
        if self.any_gpu:
            raise ConfigError(f"{self.package} builds no plans for {asked}; use --sm {allowed}")
        raise ConfigError(
            f"{self.package} builds for the GPU at hand only, {self._gpu().name} (SM{allowed}), "
            f"and was asked for {asked}; leave --sm away, or build on such a GPU"
        )

    def _gpu(self) -> Gpu:
        try:
            return first_gpu()
        except BuildError as error:
            raise BuildError(
                f"--backend {self.backend} builds for the GPU at hand, and {error}; {_OTHER}"
            ) from error


FLAVOURS: Final = (
    Flavour(backend="trt", package="tensorrt", extra="gpu", any_gpu=False, keeps_timings=True),
    # "Timing cache operations are no-ops in TensorRT-RTX", it warns: it times nothing in a build.
    Flavour(
        backend="trt-rtx",
        package="tensorrt_rtx",
        extra="tensorrt-rtx",
        any_gpu=True,
        keeps_timings=False,
    ),
)


def flavour_of(backend: str) -> Flavour:
    """Return the package behind a backend's name.

    Raises:
        ConfigError: there is no such backend.
    """
    for flavour in FLAVOURS:
        if flavour.backend == backend:
            return flavour
    names = " or ".join(flavour.backend for flavour in FLAVOURS)
    raise ConfigError(f"{backend!r} builds no plans; use --backend {names}")


def first_gpu() -> Gpu:
    """Return the GPU that CUDA takes if nobody chooses.

    Raises:
        BuildError: there is no driver, or no GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BuildError(f"there is no NVIDIA driver here ({error})") from error

    def ask(function: str, *arguments: object) -> None:
        code = getattr(driver, function)(*arguments)
        if code:
            said = ctypes.c_char_p()
            driver.cuGetErrorName(code, ctypes.byref(said))
            text = (said.value or b"unknown").decode()
            raise BuildError(f"CUDA finds none here ({function}: {text}, {code})")

    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    ask("cuInit", 0)
    ask("cuDeviceGet", ctypes.byref(device), 0)
    ask("cuDeviceGetName", name, len(name), device)
    ask("cuDeviceGetAttribute", ctypes.byref(major), MAJOR, device)
    ask("cuDeviceGetAttribute", ctypes.byref(minor), MINOR, device)
    return Gpu(name=name.value.decode(), sm=10 * major.value + minor.value)
