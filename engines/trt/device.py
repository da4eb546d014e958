"""A GPU as a session needs it: memory, copies, one stream, captured graphs. Nothing of torch.

`Device` is what sessions rely on. `CudaDevice` gives it by `cuda.core`, and by the driver's own
functions where `cuda.core` takes buffers only: its calls were read, and no GPU has run them yet.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export_grok.errors import ConfigError, MissingDependencyError
from export_grok.optional import require

__all__ = ["ALIGNMENT", "CudaDevice", "Device", "DeviceMemory"]

# Source: NvInferRuntime.h, setTensorAddress: "at least 256-byte alignment".
ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of a device's memory.

    Attributes:
        free: of it, now.
        total: all there is.
    """

    free: int
    total: int


class Device(Protocol):
    """One GPU and one stream of it, on which everything happens in order.

    Attributes:
        name: of the GPU.
        sm: compute capability times ten, e.g. 90.
        stream: the `cudaStream_t` as a number; not the default stream, which cannot be captured.
    """

    name: str
    sm: int
    stream: int

    def memory(self) -> DeviceMemory:
        """Return how much there is."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, a multiple of `ALIGNMENT`, that lives as long as this.

        Raises:
            ConfigError: there is not so much.
        """

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return page-locked memory of the host: copies from and to it need no detour."""

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy an array without gaps to the device; afterwards it may be changed."""

    def download(self, address: int, target: NDArray[Any]) -> None:
        """Fill an array without gaps from the device, once all work before is done."""

    def clear(self, address: int, nbytes: int) -> None:
        """Write zeros."""

    def copy_pieces(
        self, target: int, source: int, *, pieces: int, nbytes: int, pitch: int
    ) -> None:
        """Enqueue a copy of pieces of memory within the device.

        Args:
            target: address that the first piece is written to.
            source: address of the first piece; none of what is read is written.
            pieces: how many.
            nbytes: of each piece.
            pitch: from the beginning of a piece to that of the next, on both sides.
        """

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a CUDA graph of what `work` enqueues, as a function that launches it.

        `work` is called once and its enqueues are recorded, not executed.
        """


class CudaDevice:
    """A `Device` by `cuda.core`; use it in the thread that made it.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        MissingDependencyError: `cuda.core`, the driver or a GPU is missing.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        """Take one of so many GPUs as this thread's: rank r has the r-th."""
        self._core = require("cuda.core", extra="gpu")
        self._driver = require("cuda.bindings.driver", extra="gpu")
        try:
            if ranks > 1:
                self._check_count(ranks)
            self._device = self._core.Device(rank)
            self._device.set_current()
        except ConfigError:
            raise
        except Exception as error:  # of the driver, its loader or cuda.core: no common base
            raise MissingDependencyError(
                f"TensorRT plans need an NVIDIA GPU with its driver, and none can be used here "
                f"({' '.join(str(error).split())}); on a CPU, build the engine with --backend ort"
            ) from error
        major, minor = self._device.compute_capability
        self.name: str = self._device.name
        self.sm: int = 10 * major + minor
        self._stream = self._device.create_stream()
        self.stream = int(self._stream.handle)
        self._buffers: list[Any] = []

    def memory(self) -> DeviceMemory:
        """Return how much there is."""
        free, total = self._call("cuMemGetInfo")
        return DeviceMemory(free=free, total=total)

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory that lives as long as this object."""
        try:
            buffer = self._device.allocate(nbytes, stream=self._stream)
        except Exception as error:  # cuda.core's own, which is not public
            raise ConfigError(
                f"{nbytes} bytes of device memory cannot be had on {self.name} ({error}); "
                "end what else runs there, or build the engine with a smaller --batch or "
                "--max-length"
            ) from error
        self._buffers.append(buffer)
        address = int(buffer.handle)
        if address % ALIGNMENT:
            raise AssertionError(f"CUDA gave address {address:#x}, no multiple of {ALIGNMENT}")
        return address

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return page-locked memory of the host."""
        buffer = self._core.LegacyPinnedMemoryResource().allocate(nbytes)
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(int(buffer.handle))
        memory.owner = buffer  # an array keeps `memory`, and with it the buffer
        return np.frombuffer(memory, np.uint8)

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy an array without gaps to the device; afterwards it may be changed."""
        _check_gapless(source)
        self._call("cuMemcpyHtoDAsync", address, source.ctypes.data, source.nbytes, self._handle)
        self._stream.sync()

    def download(self, address: int, target: NDArray[Any]) -> None:
        """Fill an array without gaps from the device, once all work before is done."""
        _check_gapless(target)
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, self._handle)
        self._stream.sync()

    def clear(self, address: int, nbytes: int) -> None:
        """Write zeros."""
        self._call("cuMemsetD8Async", address, 0, nbytes, self._handle)

    def copy_pieces(
        self, target: int, source: int, *, pieces: int, nbytes: int, pitch: int
    ) -> None:
        """Enqueue a copy of pieces of memory within the device.

        Source: the manual of `cuMemcpy2DAsync`. It may refuse a pitch that `cuMemAllocPitch` has
        not given out, and does so from CU_DEVICE_ATTRIBUTE_MAX_PITCH on.
        """
        plan = self._driver.CUDA_MEMCPY2D()
        device = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        plan.srcMemoryType, plan.srcDevice, plan.srcPitch = device, source, pitch
        plan.dstMemoryType, plan.dstDevice, plan.dstPitch = device, target, pitch
        plan.WidthInBytes, plan.Height = nbytes, pieces
        self._call("cuMemcpy2DAsync", plan, self._handle)

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a CUDA graph of what `work` enqueues, as a function that launches it."""
        builder = self._stream.create_graph_builder()
        builder.begin_building("thread_local")
        try:
            work()
        finally:
            builder.end_building()  # after a failure too: else the stream stays in capture
        graph = builder.complete()

        def launch() -> None:
            graph.launch(self._stream)

        return launch

    def _check_count(self, ranks: int) -> None:
        """Hold the GPUs to what ranks need; where none can be used, that is told elsewhere."""
        self._driver.cuInit(0)
        code, seen = self._driver.cuDeviceGetCount()
        if not int(code) and 0 < seen < ranks:
            raise ConfigError(
                f"the plans are for {ranks} ranks, each on a GPU of its own: needs {ranks} GPUs, "
                f"sees {seen}; run them where there are {ranks} (CUDA_VISIBLE_DEVICES may hide "
                "some), or build the engine with a smaller --tp"
            )

    @property
    def _handle(self) -> Any:
        return self._stream.handle

    def _call(self, function: str, *arguments: Any) -> tuple[Any, ...]:
        """Return what a function of the driver gives behind its error code."""
        code, *results = getattr(self._driver, function)(*arguments)
        if int(code):
            raise RuntimeError(f"{function} failed on {self.name}: {code}")
        return tuple(results)


def _check_gapless(array: NDArray[Any]) -> None:
    if not array.flags.c_contiguous:
        raise AssertionError(f"an array of strides {array.strides} cannot be copied as bytes")
