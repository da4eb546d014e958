"""A GPU that kernels of ours are launched on: `engines.trt.device.CudaDevice` and a little more.

`KernelDevice` is what checks and measurements rely on. No GPU has run `Gpu` yet.
"""

from collections.abc import Callable
from typing import Any, Protocol

from export_grok.engines.trt.device import CudaDevice, Device
from export_grok.optional import require
from scripts.gpu.launch import Argument, Compiled

__all__ = ["Gpu", "KernelDevice", "gpu_count"]


class KernelDevice(Device, Protocol):
    """A `Device` that launches kernels and takes times.

    Attributes:
        l2_bytes: of the second-level cache.
        multiprocessors: how many there are.
    """

    l2_bytes: int
    multiprocessors: int

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Write one byte everywhere."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device."""

    def launch(self, compiled: Compiled, arguments: tuple[Argument, ...]) -> None:
        """Enqueue one launch of a kernel."""

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Return how long the device takes for what `work` enqueues, by its own clock."""

    def release(self) -> None:
        """Give back all memory that was allocated."""


class Gpu(CudaDevice):
    """A `KernelDevice` by `cuda.core`."""

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__(ordinal)
        found = self._device.properties
        self.l2_bytes: int = found.l2_cache_size
        self.multiprocessors: int = found.multiprocessor_count
        (number,) = self._call("cuDriverGetVersion")
        self.cuda_version = f"{number // 1000}.{number % 1000 // 10}"
        # By hash. A module lives as long as it is kept.
        self._modules: dict[str, tuple[Any, Any]] = {}

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Write one byte everywhere."""
        self._call("cuMemsetD8Async", address, byte, nbytes, self._handle)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device."""
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, self._handle)

    def launch(self, compiled: Compiled, arguments: tuple[Argument, ...]) -> None:
        """Enqueue one launch; the driver compiles the PTX at the first."""
        kernel = compiled.kernel
        if kernel.hash not in self._modules:
            module = self._core.ObjectCode.from_ptx(kernel.ptx.encode())
            self._modules[kernel.hash] = module, module.get_kernel(kernel.name)
        config = self._core.LaunchConfig(
            grid=compiled.launch.grid, block=kernel.threads, shmem_size=kernel.shared_bytes
        )
        self._core.launch(self._stream, config, self._modules[kernel.hash][1], *arguments)

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Return how long the device takes for what `work` enqueues, by its own clock."""
        timed = self._core.EventOptions(timing_enabled=True)
        begin = self._stream.record(options=timed)
        work()
        end = self._stream.record(options=timed)
        end.sync()
        return float(end - begin)

    def release(self) -> None:
        """Give back all memory that was allocated."""
        self._buffers.clear()
        self._stream.sync()
        if self._device.properties.memory_pools_supported:
            # What the pool keeps for later would not count as free.
            (pool,) = self._call("cuDeviceGetMemPool", self._device.device_id)
            self._call("cuMemPoolTrimTo", pool, 0)


def gpu_count() -> int:
    """Return how many GPUs the driver offers.

    Raises:
        MissingDependencyError: `cuda.bindings` is not installed.
    """
    driver = require("cuda.bindings.driver", extra="gpu")
    count = 0
    for code, *found in (driver.cuInit(0), driver.cuDeviceGetCount()):
        if int(code):
            raise RuntimeError(f"the driver cannot count its GPUs: {code}")
        count = int(found[0]) if found else 0
    return count
