"""Embedding, layers and head of one phase: what lies where, and the enqueues in their order.

One execution context serves all layers: between two enqueues it is given other addresses. The
residual stream goes from one of two buffers to the other. A cache is bound to one address as input
and as output, which is how TensorRT writes it in place.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.communicator import SUMMING, Communicator
from export_grok.engines.trt.device import Device
from export_grok.engines.trt.engine import Context, Engine
from export_grok.engines.trt.record import GraphRecord
from export_grok.engines.trt.tensors import CACHES, binding_of, size_of, state_of
from export_grok.engines.trt.weights import RankWeights

__all__ = ["Cache", "Chain", "Loaded", "buffer_bytes", "scratch_bytes"]

# Addresses of a layer's cache, by the names of the graph's inputs.
Cache = Mapping[str, int]

# A graph, and the engine of its plan.
Loaded = tuple[GraphRecord, Engine]


def buffer_bytes(embedding: GraphRecord, layer: GraphRecord, head: GraphRecord) -> int:
    """Return the bytes of a chain's inputs, outputs and residual stream."""
    others = (row for graph in (embedding, head) for row in state_of(graph) if row.name != "h")
    return sum(map(size_of, (*state_of(layer), *others)))


def scratch_bytes(*engines: Engine) -> int:
    """Return the bytes that a chain's plans work in: one after the other, in the same memory."""
    return max(1, *(engine.scratch for engine in engines))


class Chain:
    """The enqueues of one phase, with buffers of their own."""

    def __init__(
        self,
        device: Device,
        embedding: Loaded,
        layer: Loaded,
        head: Loaded,
        *,
        weights: RankWeights,
        caches: Sequence[Cache],
        communicator: Communicator | None = None,
    ) -> None:
        """Allocate the buffers and make the contexts.

        Args:
            device: to run on.
            embedding: graph and engine.
            layer: graph and engine, of all layers.
            head: graph and engine, of either head.
            weights: loaded.
            caches: of each layer.
            communicator: of the ranks that share the layers, if there are several.
        """
        self._device = device
        self._communicator = communicator
        self._graph: Callable[[], None] | None = None
        self._enqueued = False
        scratch = device.allocate(scratch_bytes(embedding[1], layer[1], head[1]))
        self._inputs: dict[str, tuple[int, tuple[int, ...]]] = {}
        streams = [device.allocate(size_of(binding_of(layer[0], "h"))) for _ in range(2)]
        self._steps: list[_Step] = []

        own = {"tokens": self._input(embedding, "tokens"), "h": streams[0]}
        if communicator is not None:
            own["first"] = self._input(embedding, "first")
        self._add(embedding, scratch, [own], weights)
        start = self._input(layer, "start")
        self._add(
            layer,
            scratch,
            [
                {
                    "h": streams[number % 2],
                    "h_out": streams[(number + 1) % 2],
                    "start": start,
                    **cache,
                }
                for number, cache in enumerate(caches)
            ],
            weights,
        )
        logits = binding_of(head[0], "logits")
        self._logits = device.allocate(size_of(logits))
        on_host = device.host_memory(size_of(logits)).view(np.float32)
        self._logits_on_host = on_host.reshape(-1, logits.shape[-1])
        own = {"h": streams[len(caches) % 2], "logits": self._logits}
        if any(binding.name == "last" for binding in head[0].bindings):
            own["last"] = self._input(head, "last")
        self._add(head, scratch, [own], weights)

    def write(self, **inputs: NDArray[np.int64]) -> None:
        """Write `tokens`, `start`, `last` or `first` where the next run finds them."""
        for name, values in inputs.items():
            address, shape = self._inputs[name]
            self._device.upload(address, np.ascontiguousarray(values, np.int64).reshape(shape))

    def enqueue(self, row: int = 0, *, head: bool = True) -> None:
        """Enqueue everything once.

        Args:
            row: of the cache, if the graphs are for one row.
            head: whether the head runs too.
        """
        for step in self._steps if head else self._steps[:-1]:
            step.enqueue(self._device.stream, row)

    def replay(self) -> None:
        """Enqueue everything, from the second time on as one CUDA graph.

        The first time TensorRT makes ready what it needs, which a capture would not allow.
        """
        if self._enqueued and self._graph is None:
            self._graph = self._device.captured(self.enqueue)
        if self._graph is not None:
            self._graph()
        else:
            self.enqueue()
            self._enqueued = True

    def logits(self, tokens: int) -> NDArray[np.float32]:
        """Return the logits of the first so many tokens of the last run [tokens, V]: a copy."""
        part = self._logits_on_host[:tokens]
        self._device.download(self._logits, part)
        return part.copy()

    def _input(self, loaded: Loaded, name: str) -> int:
        binding = binding_of(loaded[0], name)
        address = self._device.allocate(size_of(binding))
        self._device.clear(address, size_of(binding))
        self._inputs[name] = (address, binding.shape)
        return address

    def _add(
        self,
        loaded: Loaded,
        scratch: int,
        runs: Sequence[Mapping[str, int]],
        weights: RankWeights,
    ) -> None:
        """Add enqueues of one context: for each the addresses of what is no weight, by name."""
        graph, engine = loaded
        context = engine.context(scratch)
        if self._communicator is not None and graph.kind in SUMMING:
            self._communicator.join(context, f"{graph.kind} ({graph.phase})")
        for number, own in enumerate(runs):
            found = weights.addresses(graph, number)
            fixed, by_row = {}, {}
            for binding in graph.bindings:
                name = binding.aliases or binding.name
                if name in CACHES:
                    by_row[binding.name] = (own[name], size_of(binding))
                else:
                    fixed[binding.name] = found.get(name) or own[name]
            self._steps.append(_Step(context, fixed, by_row))


class _Step:
    """One enqueue of a context.

    Rows of a cache lie one behind the other: a graph for one row is bound to the row it is for. A
    graph for all rows is only ever run for row 0.
    """

    def __init__(
        self, context: Context, fixed: dict[str, int], by_row: dict[str, tuple[int, int]]
    ) -> None:
        self._context = context
        self._fixed = fixed
        self._by_row = by_row

    def enqueue(self, stream: int, row: int) -> None:
        for name, address in self._fixed.items():
            self._context.bind(name, address)
        for name, (address, length) in self._by_row.items():
            self._context.bind(name, address + row * length)
        self._context.enqueue(stream)
