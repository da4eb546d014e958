"""GPUs as their makers describe them: memory, its bandwidth, and the link between two of them."""

from dataclasses import dataclass
from typing import Final

__all__ = ["DATA_SHEETS", "INFINIBAND", "DataSheet", "Link"]

GB: Final = 10**9
US: Final = 1e-6


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the GPUs of a group.

    Attributes:
        name: of the technology.
        rate: bytes per second that a GPU sends, and at once receives.
        latency: seconds of an all-reduce of nothing among 8 GPUs: assumed, not measured.
    """

    name: str
    rate: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """One GPU.

    Attributes:
        name: in full.
        memory: in bytes.
        bandwidth: of the memory, in bytes per second.
        link: to the other GPUs of a machine.
    """

    name: str
    memory: float
    bandwidth: float
    link: Link


# Data sheets tell the rate of NVLink and PCIe both ways together; these are one way. Latencies are
# what NCCL's own tuner expects of its LL protocol by a tree (source: NVIDIA/nccl
# src/graph/tuning.cc at 01afd20, tables `baseLat` and `hwLat`): 4.4 us to start, and from GPU to
# GPU and back 2 * 7 * 0.52 us by NVLink, 2 * 7 * 1.0 us by PCIe, and among 16 of two machines
# 2 * (7 * 1.8 * 0.52 + 5.0) us.
_NVLINK_US, _PCIE_US, _NETWORK_US = 12, 19, 28

NVLINK_3 = Link(name="NVLink 3", rate=300 * GB, latency=_NVLINK_US * US)
NVLINK_4 = Link(name="NVLink 4", rate=450 * GB, latency=_NVLINK_US * US)
NVLINK_5 = Link(name="NVLink 5", rate=900 * GB, latency=_NVLINK_US * US)
PCIE_4 = Link(name="PCIe 4.0 x16", rate=32 * GB, latency=_PCIE_US * US)
PCIE_5 = Link(name="PCIe 5.0 x16", rate=64 * GB, latency=_PCIE_US * US)
# One port of 400 Gb/s for each GPU, between two machines.
INFINIBAND = Link(name="InfiniBand NDR", rate=50 * GB, latency=_NETWORK_US * US)


def _sheet(name: str, gigabytes: int, bandwidth: int, link: Link) -> DataSheet:
    return DataSheet(name=name, memory=gigabytes * GB, bandwidth=bandwidth * GB, link=link)


# Sources: NVIDIA's data sheets of these products. Of the B200 it is 180 GB in HGX and DGX.
DATA_SHEETS: Final = {
    "a100": _sheet("A100 SXM 80 GB", 80, 2039, NVLINK_3),
    "h100": _sheet("H100 SXM", 80, 3350, NVLINK_4),
    "h200": _sheet("H200 SXM", 141, 4800, NVLINK_4),
    "b200": _sheet("B200 SXM", 180, 8000, NVLINK_5),
    "l40s": _sheet("L40S", 48, 864, PCIE_4),
    "rtx-6000-ada": _sheet("RTX 6000 Ada", 48, 960, PCIE_4),
    "rtx-pro-6000": _sheet("RTX PRO 6000 Blackwell", 96, 1792, PCIE_5),
}
