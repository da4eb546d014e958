"""Memory of the host in place of a GPU's, for plans that are interpreted on a CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.device import ALIGNMENT, DeviceMemory
from export_grok.engines.trt.record import Binding
from export_grok.engines.trt.tensors import ELEMENTS, size_of
from export_grok.errors import ConfigError
from export_grok.machine import available_memory, this_machine

__all__ = ["HostDevice"]

# What memory holds before it is written: no number in any float dtype, as nothing may rely on it.
UNWRITTEN = 0xFF


class HostDevice:
    """A `engines.trt.device.Device` at addresses of the host; work is done when it is enqueued.

    Attributes:
        name: of what it is.
        sm: none, so 0.
        stream: the only one.
    """

    name = "a CPU"
    sm = 0
    stream = 0

    def __init__(self) -> None:
        self._buffers: dict[int, NDArray[np.uint8]] = {}

    def memory(self) -> DeviceMemory:
        """Return how much the host has."""
        return DeviceMemory(free=available_memory(), total=this_machine().memory)

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory that lives as long as this object."""
        try:
            memory = np.full(nbytes + ALIGNMENT, UNWRITTEN, np.uint8)
        except MemoryError as error:
            raise ConfigError(f"{nbytes} bytes of memory cannot be had on this machine") from error
        gap = -memory.ctypes.data % ALIGNMENT
        address: int = memory.ctypes.data + gap
        self._buffers[address] = memory[gap : gap + nbytes]
        return address

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory of the host."""
        return np.empty(nbytes, np.uint8)

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy an array without gaps."""
        self._at(address, source.nbytes)[:] = source.reshape(-1).view(np.uint8)

    def download(self, address: int, target: NDArray[Any]) -> None:
        """Fill an array without gaps."""
        target.reshape(-1).view(np.uint8)[:] = self._at(address, target.nbytes)

    def clear(self, address: int, nbytes: int) -> None:
        """Write zeros."""
        self._at(address, nbytes)[:] = 0

    def copy_pieces(
        self, target: int, source: int, *, pieces: int, nbytes: int, pitch: int
    ) -> None:
        """Copy pieces of memory."""
        for start in range(0, pieces * pitch, pitch):
            self._at(target + start, nbytes)[:] = self._at(source + start, nbytes)

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return what does the work: there is nothing to save by recording it."""
        return work

    def array(self, address: int, binding: Binding) -> NDArray[Any]:
        """Return what is bound to an address, to read and to write."""
        memory = self._at(address, size_of(binding))
        return memory.view(ELEMENTS[binding.dtype]).reshape(binding.shape)

    def _at(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Return so many bytes at an address, which lie in one buffer."""
        for first, memory in self._buffers.items():
            if first <= address and address + nbytes <= first + memory.nbytes:
                return memory[address - first : address - first + nbytes]
        raise AssertionError(f"there are no {nbytes} bytes of memory at {address:#x}")
