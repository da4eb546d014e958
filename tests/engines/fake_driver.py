"""Stand-ins for the libraries of NVIDIA's driver and of NCCL, called as ctypes calls them."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest

from export_grok.engines import gpus
from export_grok.engines.gpus import Ports

__all__ = ["Card", "FakeMachine", "machine_of"]

GIB = 1 << 30
NO_DEVICE = 100
OPEN = Ports(loopback=None, address="10.0.0.7", host=None)


@dataclass(frozen=True)
class Card:
    """One GPU."""

    name: str = "NVIDIA H100 80GB HBM3"
    sm: int = 90
    memory: int = 85_500_000_000
    free: int = 85_000_000_000


@dataclass
class FakeMachine:
    """What the libraries of a machine know.

    Attributes:
        cards: its GPUs.
        apart: pairs that cannot reach each other, the first number the lower.
        nvml: whether that library is there.
        nccl: as NCCL tells its version; None if it is not there.
        shared: length of /dev/shm.
        ports: that can be reached.
        failure: what cuInit returns.
    """

    cards: list[Card]
    apart: set[tuple[int, int]] = field(default_factory=set)
    nvml: bool = True
    nccl: int | None = 22705
    shared: int | None = 16 * GIB
    ports: Ports = OPEN
    failure: int = 0

    def library(self, name: str) -> Any:
        """Return the library of that file name; None if it is not there."""
        if name.startswith("libnvidia-ml"):
            return _Nvml(self) if self.nvml else None
        if name.startswith("libnccl"):
            return None if self.nccl is None else _Nccl(self.nccl)
        return _Cuda(self) if name.startswith("libcuda") else None


def machine_of(monkeypatch: pytest.MonkeyPatch, machine: FakeMachine | None) -> None:
    """Let `gpus_here` see this machine; one without a driver if it is None."""
    found = machine or FakeMachine(cards=[])
    monkeypatch.setattr(gpus, "_library", found.library if machine else lambda _name: None)
    monkeypatch.setattr(gpus, "NCCL_PACKAGES", ())
    monkeypatch.setattr(gpus, "_shared_memory", lambda: found.shared)
    monkeypatch.setattr(gpus, "_ports", lambda: found.ports)


def _put(reference: Any, value: int) -> int:
    reference._obj.value = value
    return 0


class _Cuda:
    def __init__(self, machine: FakeMachine) -> None:
        self._machine, self._cards = machine, machine.cards

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        return _put(version, 13000)

    def cuInit(self, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return self._machine.failure

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        assert code == self._machine.failure
        name._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        return _put(count, len(self._cards))

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802
        return _put(handle, index + 100)  # a handle is no index

    def cuDeviceGetName(self, name: Any, length: int, handle: ctypes.c_int) -> int:  # noqa: N802
        name.value = self._card(handle).name.encode()[: length - 1]
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, handle: ctypes.c_int) -> int:  # noqa: N802
        return _put(memory, self._card(handle).memory)

    def cuDeviceGetPCIBusId(self, bus: Any, length: int, handle: ctypes.c_int) -> int:  # noqa: N802
        assert length >= 13
        bus.value = b"0000:%02x:00.0" % (handle.value - 100)
        return 0

    def cuDeviceGetAttribute(self, found: Any, number: int, handle: ctypes.c_int) -> int:  # noqa: N802
        major, minor = divmod(self._card(handle).sm, 10)
        return _put(found, {75: major, 76: minor}[number])

    def cuDeviceCanAccessPeer(self, reach: Any, one: ctypes.c_int, other: ctypes.c_int) -> int:  # noqa: N802
        first, second = sorted((one.value - 100, other.value - 100))
        return _put(reach, (first, second) not in self._machine.apart)

    def _card(self, handle: ctypes.c_int) -> Card:
        return self._cards[handle.value - 100]


class _Nvml:
    def __init__(self, machine: FakeMachine) -> None:
        self._cards = machine.cards

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:  # noqa: N802
        text.value = b"580.65.06"[: length - 1]
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, handle: Any) -> int:  # noqa: N802
        return _put(handle, 1 + int(bus[5:7], 16))

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:  # noqa: N802
        assert handle.value is not None
        memory._obj.free = self._cards[handle.value - 1].free
        return 0


class _Nccl:
    def __init__(self, version: int) -> None:
        self._version = version

    def ncclGetVersion(self, version: Any) -> int:  # noqa: N802
        return _put(version, self._version)
