"""What the driver's libraries tell is told on, and each planted fault is found and no other."""

import ctypes
import dataclasses
import socket

import pytest

from export_grok.engines import gpus
from export_grok.engines.gpu_findings import gpu_findings
from export_grok.engines.gpus import Gpus, Ports, gpus_here
from tests.engines.fake_driver import GIB, NO_DEVICE, Card, FakeMachine, machine_of

FULL = Card(free=10_000_000_000)
OLD = Card(name="Tesla T4", sm=75)
BLOCKED = Ports(loopback=None, address="10.0.0.7", host="timed out")
DOWN = Ports(loopback="Cannot assign requested address", address=None, host=None)


def two(**changes: object) -> FakeMachine:
    return dataclasses.replace(FakeMachine(cards=[Card(), Card()]), **changes)  # type: ignore[arg-type]


def test_without_a_driver_there_is_nothing_and_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_of(monkeypatch, None)
    found = gpus_here()
    assert found == Gpus(driver=None)
    assert gpu_findings(found) == ()


def test_every_gpu_is_told_as_the_driver_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Card(), Card(name="NVIDIA L40S", sm=89, memory=48 * GIB, free=47 * GIB)]
    machine_of(monkeypatch, FakeMachine(cards=cards, apart={(0, 1)}))
    found = gpus_here()
    assert found.driver == "580.65.06, for CUDA 13.0"
    assert [dataclasses.astuple(device) for device in found.devices] == [
        (card.name, card.sm, card.memory, card.free) for card in cards
    ]
    assert found.apart == ((0, 1),)
    assert (found.nccl, found.shared_memory) == ("2.27.5", 16 * GIB)


def test_without_nvml_free_memory_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of(monkeypatch, two(nvml=False))
    found = gpus_here()
    assert found.driver == "for CUDA 13.0"
    assert [device.free for device in found.devices] == [None, None]
    assert gpu_findings(found) == ()


def test_one_gpu_needs_nothing_that_a_group_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of(monkeypatch, FakeMachine(cards=[Card()], nccl=None, shared=0, ports=DOWN))
    assert gpu_findings(gpus_here()) == ()


@pytest.mark.parametrize(
    ("machine", "wrong", "to_do"),
    [
        (FakeMachine(cards=[], failure=NO_DEVICE), "cuInit: CUDA_ERROR_NO_DEVICE, 100", "--gpus"),
        (FakeMachine(cards=[]), "the driver shows no GPU (it counts none)", "CUDA_VISIBLE_DEV"),
        (FakeMachine(cards=[OLD]), "GPU 0, Tesla T4, is SM75, which has no bfloat16", "SM80"),
        (FakeMachine(cards=[FULL]), "hold 75.5 of the 85.5 GB of GPU 0", "--gpu-memory"),
        (two(cards=[Card(), Card(sm=80)]), "of several architectures", "CUDA_VISIBLE_DEVICES"),
        (two(apart={(0, 1)}), "GPUs 0 and 1 cannot reach each other's", "nvidia-smi topo -m"),
        (two(nccl=None), "NCCL, which several ranks need, is not", "pip install nvidia-nccl"),
        (two(nccl=21805), "NCCL is 2.18.5, and TensorRT needs 2.19", "pip install nvidia-nccl"),
        (two(shared=64 << 20), "/dev/shm has 64 MiB", "--shm-size=1g"),
        (two(shared=None), "/dev/shm is missing", "--shm-size=1g"),
        (two(ports=BLOCKED), "at 10.0.0.7 (timed out)", "NCCL_SOCKET_IFNAME=lo"),
        (two(ports=DOWN), "at 127.0.0.1 (Cannot assign", "ip link set lo up"),
    ],
)
def test_one_fault_is_one_finding_that_says_what_to_do(
    machine: FakeMachine, wrong: str, to_do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_of(monkeypatch, machine)
    (finding,) = gpu_findings(gpus_here())
    assert wrong in finding
    assert to_do in finding


def test_many_pairs_apart_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {(one, other) for other in range(8) for one in range(other)}
    machine_of(monkeypatch, FakeMachine(cards=[Card()] * 8, apart=pairs))
    found = gpus_here()
    assert found.apart == tuple(sorted(pairs))
    (finding,) = gpu_findings(found)
    assert "and 24 more pairs" in finding


def test_a_free_port_here_can_be_reached_and_an_address_of_nobody_cannot() -> None:
    assert gpus._unreachable("127.0.0.1") is None
    assert gpus._unreachable("203.0.113.1") is not None


def test_a_host_without_a_network_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert gpus._address() is None


def test_a_library_that_is_not_there_is_none() -> None:
    assert gpus._library("libof_nobody.so.1") is None
    assert isinstance(gpus._library("libc.so.6"), ctypes.CDLL)
