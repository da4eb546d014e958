"""What this machine has for engines on NVIDIA GPUs, one or several.

Asked of the libraries of the driver and of NCCL themselves, so that nothing has to be installed
for it: libcuda for GPUs, NVML for memory, NCCL for its version.
"""

import contextlib
import ctypes
import os
import socket
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from export_grok.engines.trt.module import MAJOR, MINOR

__all__ = ["SHARED_MEMORY", "Device", "Gpus", "Ports", "gpus_here"]

SHARED_MEMORY: Final = "/dev/shm"
NCCL_PACKAGES: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU.

    Attributes:
        name: that the driver gives it.
        sm: compute capability without the point, e.g. 90.
        memory: in bytes.
        free: of it; None where NVML does not say.
    """

    name: str
    sm: int
    memory: int
    free: int | None


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Whether a program here can listen and be reached by its neighbours.

    Attributes:
        loopback: at 127.0.0.1; why not, or None.
        address: of this host on its network; None if it has none.
        host: at that address; why not, or None.
    """

    loopback: str | None
    address: str | None
    host: str | None


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """What was found.

    Attributes:
        driver: its version; None if there is no driver.
        devices: that CUDA sees, in its order.
        apart: pairs of them that cannot reach each other's memory.
        shared_memory: length of /dev/shm; None if there is none.
        nccl: its version; None if it is not found.
        ports: that NCCL meets through; None where there are not several GPUs.
        error: why the driver shows no GPU; None if it shows some.
    """

    driver: str | None
    devices: tuple[Device, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    shared_memory: int | None = None
    nccl: str | None = None
    ports: Ports | None = None
    error: str | None = None


class _DriverError(Exception):
    """CUDA's name for what went wrong."""


def gpus_here() -> Gpus:
    """Return what there is."""
    cuda = _library("libcuda.so.1")
    if cuda is None:
        return Gpus(driver=None)
    nvml = _library("libnvidia-ml.so.1")
    if nvml is not None and nvml.nvmlInit_v2():
        nvml = None
    driver = _driver_version(cuda, nvml)
    try:
        devices, apart = _devices(cuda, nvml)
    except _DriverError as error:
        return Gpus(driver=driver, error=str(error))
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()
    return Gpus(
        driver=driver,
        devices=devices,
        apart=apart,
        shared_memory=_shared_memory(),
        nccl=_nccl_version(),
        ports=_ports() if len(devices) > 1 else None,
    )


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _driver_version(cuda: Any, nvml: Any) -> str:
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"for CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    text = ctypes.create_string_buffer(80)
    if nvml is None or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return version
    return f"{text.value.decode()}, {version}"


def _devices(cuda: Any, nvml: Any) -> tuple[tuple[Device, ...], tuple[tuple[int, int], ...]]:
    """Return the GPUs, and the pairs that cannot reach each other.

    Raises:
        _DriverError: CUDA does not start.
    """

    def ask(function: str, *arguments: object) -> None:
        code = getattr(cuda, function)(*arguments)
        if code:
            said = ctypes.c_char_p()
            cuda.cuGetErrorName(code, ctypes.byref(said))
            raise _DriverError(f"{function}: {(said.value or b'unknown').decode()}, {code}")

    def attribute(number: int, handle: ctypes.c_int) -> int:
        found = ctypes.c_int()
        ask("cuDeviceGetAttribute", ctypes.byref(found), number, handle)
        return found.value

    count = ctypes.c_int()
    ask("cuInit", 0)
    ask("cuDeviceGetCount", ctypes.byref(count))
    handles, devices = [], []
    for index in range(count.value):
        handle, memory = ctypes.c_int(), ctypes.c_size_t()
        name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        ask("cuDeviceGet", ctypes.byref(handle), index)
        ask("cuDeviceGetName", name, len(name), handle)
        ask("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        ask("cuDeviceGetPCIBusId", bus, len(bus), handle)
        handles.append(handle)
        devices.append(
            Device(
                name=name.value.decode(),
                sm=10 * attribute(MAJOR, handle) + attribute(MINOR, handle),
                memory=memory.value,
                free=_free(nvml, bus.value),
            )
        )
    if not devices:
        raise _DriverError("it counts none")
    apart = []
    for first, one in enumerate(handles):
        for second, other in enumerate(handles[:first]):
            reach = ctypes.c_int()
            ask("cuDeviceCanAccessPeer", ctypes.byref(reach), one, other)
            if not reach.value:
                apart.append((second, first))
    return tuple(devices), tuple(sorted(apart))


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _free(nvml: Any, bus: bytes) -> int | None:
    """Return free bytes. CUDA tells them only in a context, which takes some of them."""
    if nvml is None:
        return None
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)):
        return None
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return None
    return int(memory.free)


def _shared_memory() -> int | None:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _nccl_version() -> str | None:
    """Return the version of the NCCL that is found: the system's, or that of a package."""
    nccl = _library("libnccl.so.2")
    for package in NCCL_PACKAGES:
        if nccl is None:
            with contextlib.suppress(metadata.PackageNotFoundError):
                folder = metadata.distribution(package).locate_file("nvidia/nccl/lib")
                nccl = _library(str(folder / "libnccl.so.2"))
    number = ctypes.c_int()
    if nccl is None or nccl.ncclGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def _ports() -> Ports:
    address = _address()
    return Ports(
        loopback=_unreachable("127.0.0.1"),
        address=address,
        host=None if address is None else _unreachable(address),
    )


def _address() -> str | None:
    """Return the address this host would send from; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))  # reserved for documentation: nobody has it
        return str(one.getsockname()[0])
    return None


def _unreachable(address: str) -> str | None:
    """Return why no connection to a free port at `address` comes about; None if one does."""
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=SECONDS).close()
    except OSError as error:
        return str(error)
    return None
