"""What keeps engines on GPUs, or several ranks of one, from running well, and what to do."""

from collections.abc import Iterator
from typing import Final

from export_grok.engines.gpus import SHARED_MEMORY, Device, Gpus, Ports
from export_grok.engines.trt.module import FIRST_BFLOAT16

__all__ = ["gpu_findings"]

# What other programs may hold before it is worth telling: a desktop takes this much.
MOSTLY_FREE: Final = 0.9
ENOUGH_SHARED: Final = 1 << 30
OLDEST_NCCL: Final = (2, 19)  # source: support matrix of TensorRT 11
INSTALL_NCCL: Final = "pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12, if CUDA is 12)"


def gpu_findings(gpus: Gpus) -> tuple[str, ...]:
    """Return what is wrong, each with what to do. Without a driver nothing is."""
    if gpus.error:
        return (
            f"the driver shows no GPU ({gpus.error}); see what `nvidia-smi` says, whether "
            "CUDA_VISIBLE_DEVICES hides them, and start a container with --gpus all",
        )
    findings = [*_of_devices(gpus.devices), *_of_links(gpus.apart)]
    if len(gpus.devices) > 1:
        findings += _of_group(gpus.shared_memory, gpus.nccl)
    if gpus.ports:
        findings += _of_ports(gpus.ports)
    return tuple(findings)


def _of_devices(devices: tuple[Device, ...]) -> Iterator[str]:
    for index, device in enumerate(devices):
        if device.sm < FIRST_BFLOAT16:
            yield (
                f"GPU {index}, {device.name}, is SM{device.sm}, which has no bfloat16; engines "
                f"need SM{FIRST_BFLOAT16} or later"
            )
        if device.free is not None and device.free < MOSTLY_FREE * device.memory:
            yield (
                f"other programs hold {(device.memory - device.free) / 1e9:.1f} of the "
                f"{device.memory / 1e9:.1f} GB of GPU {index}; `nvidia-smi` names them: end them, "
                "or build for what is left with --gpu-memory"
            )
    if len({device.sm for device in devices}) > 1:
        yield (
            "the GPUs are of several architectures, and a plan is for one; choose like ones with "
            "CUDA_VISIBLE_DEVICES"
        )


def _of_links(apart: tuple[tuple[int, int], ...]) -> Iterator[str]:
    if apart:
        pairs = ", ".join(f"{one} and {other}" for one, other in apart[:4])
        more = f" and {len(apart) - 4} more pairs" if len(apart) > 4 else ""
        yield (
            f"GPUs {pairs}{more} cannot reach each other's memory, so sums go through the host, "
            "which is slow; see `nvidia-smi topo -m`, and switch off ACS or IOMMU of the host if "
            "they should (NCCL's guide, Troubleshooting)"
        )


def _of_group(shared: int | None, nccl: str | None) -> Iterator[str]:
    if nccl is None:
        yield f"NCCL, which several ranks need, is not found; {INSTALL_NCCL}"
    elif tuple(map(int, nccl.split("."))) < OLDEST_NCCL:
        oldest = ".".join(map(str, OLDEST_NCCL))
        yield f"NCCL is {nccl}, and TensorRT needs {oldest} or later; {INSTALL_NCCL}"
    if shared is None or shared < ENOUGH_SHARED:
        has = "is missing" if shared is None else f"has {shared / (1 << 20):.0f} MiB"
        yield (
            f"{SHARED_MEMORY} {has}, and NCCL shares buffers in it; give it 1 GiB: docker run "
            f"--shm-size=1g or --ipc=host, elsewhere mount -o remount,size=1g {SHARED_MEMORY}"
        )


def _of_ports(ports: Ports) -> Iterator[str]:
    if ports.loopback:
        yield (
            f"no program can be reached at 127.0.0.1 ({ports.loopback}), where ranks meet; bring "
            "the interface up (ip link set lo up), and let the firewall pass what comes from it"
        )
    if ports.host:
        yield (
            f"no program can be reached at {ports.address} ({ports.host}), where NCCL would have "
            "its ranks meet; let the firewall pass it, or set NCCL_SOCKET_IFNAME=lo for ranks in "
            "one machine"
        )
