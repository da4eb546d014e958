"""Ranks as threads of this process, and a stub of NCCL that sums between them.

With it a test sees that all ranks ask for the same in the same order, and that no sum runs in a
context that was not given the communicator. Of NCCL, its speed and its faults it proves nothing.
"""

import ctypes
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.communicator import CAPSULE
from export_grok.engines.trt.tensors import ELEMENTS

__all__ = ["FakeGroup", "Hub", "address_in", "all_reduce", "summing", "together"]

# A rank that waits longer than this for another is in a test that fails.
PATIENCE = 20

T = TypeVar("T")


class Dtypes(enum.IntEnum):
    """As nccl4py numbers them."""

    FLOAT16 = 6
    FLOAT32 = 7
    BFLOAT16 = 9


class Hub:
    """Where the ranks of a test meet.

    Attributes:
        ranks: how many there are.
        calls: of each rank, what it said and called, in order.
        nccl: a stub of `nccl.core`, and of its bindings, that sums by this hub.
        devices: of each rank, in whose memory NCCL sums.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.calls: list[list[str]] = [[] for _ in range(ranks)]
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE)
        self._slots: list[Any] = [None] * ranks
        self.devices: dict[int, Any] = {}
        self.nccl = SimpleNamespace(
            get_version=lambda: SimpleNamespace(
                libnccl=SimpleNamespace(version=SimpleNamespace(release=(2, 30, 1)))
            ),
            get_unique_id=lambda: b"only rank 0 makes it",
            UniqueId=SimpleNamespace(from_bytes=bytes),
            Communicator=SimpleNamespace(init=self._init),
            NcclDataType=Dtypes,
            NcclRedOp=SimpleNamespace(SUM=0),
            all_reduce=self._all_reduce,
        )

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what every rank gives, once all have."""
        self._slots[rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def end(self) -> None:
        """Let nobody wait any longer."""
        self._barrier.abort()

    def _init(self, ranks: int, rank: int, unique: bytes) -> Any:
        self.calls[rank].append("init")
        assert ranks == self.ranks
        assert self.exchange(rank, unique) == [b"only rank 0 makes it"] * ranks
        return SimpleNamespace(ptr=0x1000 + rank)

    def _all_reduce(
        self, send: int, receive: int, count: int, kind: int, op: int, comm: int, stream: int
    ) -> None:
        assert op == self.nccl.NcclRedOp.SUM
        rank = comm - 0x1000
        device, dtype = self.devices[rank], ELEMENTS[Dtypes(kind).name.lower()]
        assert stream == device.stream
        device.log.append("all_reduce")
        mine = device.at(send, count * dtype.itemsize).view(dtype)
        parts = self.exchange(rank, mine.copy())
        total = device.at(receive, count * dtype.itemsize).view(dtype)
        total[...] = sum(parts[1:], start=parts[0])


class FakeGroup:
    """A fake of `engines.group.Group`: a GPU's rank asks it for words only."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.ranks = hub.ranks

    def broadcast(self, data: bytes | None, where: str) -> bytes:
        """Return what rank 0 has."""
        self.hub.calls[self.rank].append(where)
        assert (data is None) == (self.rank > 0)
        assert set(self.hub.exchange(self.rank, where)) == {where}
        found: bytes = self.hub.exchange(self.rank, data)[0]
        return found

    def partial(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return nothing: sums stay on GPUs."""
        raise AssertionError

    total = partial

    def all_reduce(self, shape: tuple[int, ...], where: str) -> None:
        """Sum nothing."""
        raise AssertionError


def address_in(capsule: object) -> int:
    """Return what TensorRT finds in a capsule."""
    look = ctypes.pythonapi.PyCapsule_GetPointer
    look.restype = ctypes.c_void_p
    look.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address: int = look(capsule, CAPSULE)
    return address


def together(hub: Hub, work: Callable[[int], T]) -> list[T]:
    """Return what every rank makes; the first error of one ends all."""

    def run(rank: int) -> T:
        try:
            return work(rank)
        except BaseException:
            hub.end()
            raise

    with ThreadPoolExecutor(hub.ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(hub.ranks)]
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


_HERE = threading.local()


@contextmanager
def summing(group: FakeGroup | None) -> Iterator[None]:
    """Have `all_reduce` sum over these ranks, in this thread."""
    _HERE.group = group
    yield
    _HERE.group = None


def all_reduce(x: Any, ranks: int) -> Any:
    """Return the sum of tensors; for the PyTorch model, in place of its own."""
    group = _HERE.group
    assert group is not None, "a sum in a context without the communicator"
    assert group.ranks == ranks
    parts: Sequence[Any] = group.hub.exchange(group.rank, x.clone())
    return sum(parts[1:], start=parts[0])
