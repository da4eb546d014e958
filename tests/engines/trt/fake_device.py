"""A fake GPU: memory of the host at invented addresses, and plans that compute on the CPU.

With it a test sees what a session binds, in which order, and what it captures, and that the logits
follow from just that. Of TensorRT, CUDA and their speed it proves nothing.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export_grok.config import Dtype, GrokConfig
from export_grok.engines.trt.communicator import SUMMING
from export_grok.engines.trt.device import ALIGNMENT, DeviceMemory
from export_grok.engines.trt.record import Binding, GraphRecord, Phase, TrtRecord
from export_grok.engines.trt.tensors import ELEMENTS, size_of
from export_grok.errors import ConfigError
from tests.engines.trt.fake_ranks import FakeGroup, address_in, summing

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "POISON",
    "Compute",
    "Enqueue",
    "FakeDevice",
    "FakeEngine",
    "FakeRuntime",
    "torch_model",
]

# Inputs of a graph by name -> its outputs in order. Caches may be written in place, too.
Compute = Callable[[Mapping[str, NDArray[Any]]], Sequence[NDArray[Any]]]

# What memory holds before it is written: NaN in every float dtype, -1 in every integer one.
POISON = 0xFF
GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Enqueue:
    """One run of a plan.

    Attributes:
        kind: of the graph.
        phase: of the graph.
        part: of the graph.
        addresses: that were bound, by name.
    """

    kind: str
    phase: Phase
    addresses: Mapping[str, int]
    part: int = 0


@dataclass(kw_only=True)
class FakeDevice:
    """A fake of `engines.trt.device.Device`.

    Attributes:
        log: all that was asked of it and of its plans, in order, by one word each.
        runs: plans that ran, in order, by enqueue or by graph.
        buffers: what was allocated, by address.
    """

    name: str = "FakeGPU"
    sm: int = 90
    stream: int = 7
    free: int = 80 * GB
    total: int = 80 * GB
    log: list[str] = field(default_factory=list)
    runs: list[Enqueue] = field(default_factory=list)
    buffers: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    _end: int = 1 << 32  # beyond int32
    _capture: list[Callable[[], None]] | None = None

    def memory(self) -> DeviceMemory:
        """Return what the test says there is, less what was allocated."""
        return DeviceMemory(free=self.free - self.allocated, total=self.total)

    @property
    def allocated(self) -> int:
        """Bytes that were allocated."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def allocate(self, nbytes: int) -> int:
        """Return the address of poisoned memory; before and behind it lies none."""
        self._outside("allocate")
        assert nbytes > 0
        if self.allocated + nbytes > self.free:
            raise ConfigError(f"{nbytes} bytes cannot be had on {self.name}")
        address = self._end
        self._end += nbytes + -nbytes % ALIGNMENT + ALIGNMENT
        self.buffers[address] = np.full(nbytes, POISON, np.uint8)
        return address

    def host_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory of the host."""
        return np.full(nbytes, POISON, np.uint8)

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy to the device."""
        self._outside("upload")
        assert source.flags.c_contiguous
        self.at(address, source.nbytes)[:] = source.reshape(-1).view(np.uint8)

    def download(self, address: int, target: NDArray[Any]) -> None:
        """Copy from the device."""
        self._outside("download")
        assert target.flags.c_contiguous
        target.reshape(-1).view(np.uint8)[:] = self.at(address, target.nbytes)

    def clear(self, address: int, nbytes: int) -> None:
        """Write zeros."""
        self._outside("clear")
        self.at(address, nbytes)[:] = 0

    def copy_pieces(
        self, target: int, source: int, *, pieces: int, nbytes: int, pitch: int
    ) -> None:
        """Copy pieces; the driver takes none that overlap, and promises no order of them."""
        self._outside("copy")
        assert 0 < nbytes <= pitch
        read, written = (
            [self.at(address + number * pitch, nbytes) for number in range(pieces)]
            for address in (source, target)
        )
        assert not any(np.shares_memory(one, other) for one in read for other in written)
        for one, other in zip(read, written, strict=True):
            other[:] = one

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Keep what is enqueued by `work` and return what does it."""
        self._outside("capture")
        kept: list[Callable[[], None]] = []
        self._capture = kept
        work()
        self._capture = None

        def launch() -> None:
            self._outside("launch")
            for run in kept:
                run()

        return launch

    def at(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Return so many bytes at an address, which must lie in one buffer."""
        for first, buffer in self.buffers.items():
            if first <= address < first + buffer.nbytes:
                assert address + nbytes <= first + buffer.nbytes, "beyond the end of a buffer"
                return buffer[address - first : address - first + nbytes]
        raise AssertionError(f"there is no memory at {address:#x}")

    def submit(self, run: Callable[[], None]) -> None:
        """Do what a context enqueues, now or at the launch of the graph that is captured."""
        self.log.append("enqueue")
        if self._capture is None:
            run()
        else:
            self._capture.append(run)

    @property
    def capturing(self) -> bool:
        """Whether enqueues are recorded now."""
        return self._capture is not None

    def _outside(self, call: str) -> None:
        assert not self.capturing, f"{call} during a capture"
        self.log.append(call)


@dataclass(kw_only=True)
class FakeRuntime:
    """A fake of `engines.trt.engine.Runtime`, for plans of the record.

    Attributes:
        compute: what a graph computes.
        group: the ranks that share the layers, if there are several.
        scratch: bytes that each plan says it works in.
        change: what a plan says of an input or output, made of what is true.
    """

    device: FakeDevice
    record: TrtRecord
    compute: Callable[[GraphRecord], Compute]
    group: FakeGroup | None = None
    version: str = "1.2.3"
    scratch: int = 1000
    change: Callable[[Binding], Binding | None] = lambda binding: binding

    def __post_init__(self) -> None:
        if self.group is not None:
            self.group.hub.devices[self.group.rank] = self.device

    def engine(self, plan: Path) -> "FakeEngine":
        """Return the engine of a plan, of which only the name is looked at."""
        self.device.log.append("deserialise")
        (found,) = (row for row in self.record.plans if plan.match(row.file))
        assert found.sm == self.device.sm
        (graph,) = (
            row
            for row in self.record.graphs
            if (row.kind, row.phase, row.part) == (found.kind, found.phase, found.part)
        )
        return FakeEngine(self, graph)


class FakeEngine:
    """A fake of `engines.trt.engine.Engine`."""

    def __init__(self, runtime: FakeRuntime, graph: GraphRecord) -> None:
        self.runtime = runtime
        self.graph = graph
        self.scratch = runtime.scratch
        bare = [
            Binding(
                name=row.name,
                direction=row.direction,
                shape=row.shape,
                dtype=row.dtype,
                aliases=row.aliases,
            )
            for row in graph.bindings
        ]
        self.tensors = tuple(row for row in map(runtime.change, bare) if row is not None)

    def context(self, scratch: int) -> "FakeContext":
        """Return a context."""
        device = self.runtime.device
        device.log.append("context")
        device.at(scratch, self.scratch)
        return FakeContext(self)


class FakeContext:
    """A fake of `engines.trt.engine.Context`."""

    def __init__(self, engine: FakeEngine) -> None:
        self._graph = engine.graph
        self._group = engine.runtime.group
        self._sums = (
            self._group is not None
            and engine.graph.kind in SUMMING
            and engine.runtime.record.sums == "plan"
        )
        self._joined: FakeGroup | None = None
        self._device = engine.runtime.device
        self._compute = engine.runtime.compute(engine.graph)
        self._rows = {row.name: row for row in engine.graph.bindings}
        self._addresses: dict[str, int] = {}
        self._enqueued = False

    def bind(self, name: str, address: int) -> None:
        """Keep an address."""
        assert address % ALIGNMENT == 0
        self._device.at(address, size_of(self._rows[name]))
        self._addresses[name] = address

    def set_communicator(self, capsule: object) -> None:
        """Wait for the same context of every rank, as TensorRT does."""
        group = self._group
        assert group is not None
        assert self._sums, "a context that sums nothing"
        assert not self._enqueued, "joined after it ran"
        assert address_in(capsule) == 0x1000 + group.rank
        group.hub.calls[group.rank].append("set_communicator")
        self._device.log.append("set_communicator")
        mine = (self._graph.kind, self._graph.phase)
        assert set(group.hub.exchange(group.rank, mine)) == {mine}
        self._joined = group

    def enqueue(self, stream: int) -> None:
        """Run with the addresses as they are now."""
        assert stream == self._device.stream != 0
        assert self._addresses.keys() == self._rows.keys(), "something is not bound"
        assert self._enqueued or not self._device.capturing, "captured before it ever ran"
        self._enqueued = True
        addresses = dict(self._addresses)
        self._device.submit(functools.partial(self._run, addresses))

    def _run(self, addresses: Mapping[str, int]) -> None:
        self._device.runs.append(
            Enqueue(
                kind=self._graph.kind,
                phase=self._graph.phase,
                addresses=addresses,
                part=self._graph.part,
            )
        )
        found = {
            name: self._device.at(addresses[name], size_of(row))
            .view(ELEMENTS[row.dtype])
            .reshape(row.shape)
            for name, row in self._rows.items()
        }
        inputs = {name: found[name] for name, row in self._rows.items() if row.direction == "in"}
        for name, array in inputs.items():
            assert array.dtype != np.int64 or array.min() >= 0, f"{name} was never written"
        outputs = [found[name] for name in self._rows if name not in inputs]
        with summing(self._joined):
            values = self._compute(inputs)
        for target, value in zip(outputs, values, strict=True):
            assert target.shape == value.shape
            assert target.dtype == value.dtype
            target[...] = value


def torch_model(
    config: GrokConfig, dtype: Dtype, rank: int = 0, ranks: int = 1
) -> Callable[[GraphRecord], Compute]:
    """Return what computes a graph by the PyTorch model, as a rank does."""
    return lambda graph: functools.partial(_by_torch, config, dtype, (rank, ranks), graph)


def _by_torch(
    config: GrokConfig,
    dtype: Dtype,
    place: tuple[int, int],
    graph: GraphRecord,
    inputs: Mapping[str, NDArray[Any]],
) -> list[NDArray[Any]]:
    from torch import no_grad
    from torch.func import functional_call

    weights = {row.weight: tensor(inputs[row.name]) for row in graph.bindings if row.weight}
    others = [
        tensor(inputs[row.name])
        for row in graph.bindings
        if row.direction == "in" and not row.weight
    ]
    module = _module(graph.kind, config, dtype, place, int8_head="unembedding.weight" in weights)
    with no_grad():
        made = functional_call(module, weights, tuple(others), strict=True)
    return [array(value) for value in (made if isinstance(made, tuple) else (made,))]


@functools.cache
def _module(
    kind: str, config: GrokConfig, dtype: Dtype, place: tuple[int, int], int8_head: bool
) -> "nn.Module":
    """Return a module of its own for every rank: while one runs, it holds that rank's weights."""
    from export_grok.export.model import DecoderLayer, Embedding, Head

    _, ranks = place
    if kind == "layer":
        return DecoderLayer(config, ranks)
    embedding = Embedding(config, dtype, ranks)
    if kind == "embedding":
        return embedding
    return Head(config, dtype, None if int8_head else embedding, ranks)


def tensor(values: NDArray[Any]) -> "Tensor":
    """Return the same memory as a tensor. Numpy and torch do not share a bfloat16."""
    import torch

    if values.dtype == ELEMENTS["bfloat16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def array(values: "Tensor") -> NDArray[Any]:
    """Return the same memory as an array."""
    import torch

    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(ELEMENTS["bfloat16"])
    return values.numpy()
