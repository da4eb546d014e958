"""Embedding, layers and head of one phase: what lies where, and the enqueues in their order.

One execution context serves all layers: between two enqueues it is given other addresses. The
residual stream goes from one of two buffers to the other. A cache is bound to one address as input
and as output, which is how TensorRT writes it in place.

Graphs may be cut into parts where ranks are summed. Then NCCL sums between two enqueues, in place:
what one part writes, and the next one reads as the sum, is one buffer. There are two, as a part
that reads a sum may write its own summand meanwhile.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.communicator import SUMMING, Communicator
from export_grok.engines.trt.device import Device
from export_grok.engines.trt.engine import Context, Engine
from export_grok.engines.trt.record import GraphRecord
from export_grok.engines.trt.tensors import CACHES, PARTIAL, SUM, binding_of, size_of, state_of
from export_grok.engines.trt.weights import RankWeights

__all__ = ["Cache", "Chain", "Parts", "Step", "buffer_bytes", "scratch_bytes"]

# Addresses of a layer's cache, by the names of the graph's inputs.
Cache = Mapping[str, int]

# Of every part, in order, the graph and the engine of its plan.
Parts = Sequence[tuple[GraphRecord, Engine]]


def buffer_bytes(
    embedding: Sequence[GraphRecord], layer: Sequence[GraphRecord], head: Sequence[GraphRecord]
) -> int:
    """Return the bytes of a chain's inputs, outputs, residual stream and sums, of all parts."""
    others = [row for graph in (*embedding, *head) for row in state_of(graph)]
    # What goes from part to part is an output and an input. Of sums there are two buffers.
    rows = {row.name: row for graph in layer for row in state_of(graph)}
    rows |= {f"other {row.name}": row for row in others if row.name not in ("h", PARTIAL)}
    return sum(map(size_of, rows.values()))


def scratch_bytes(*graphs: Parts) -> int:
    """Return the bytes that a chain's plans work in: one after the other, in the same memory."""
    return max(1, *(engine.scratch for parts in graphs for _, engine in parts))


class Chain:
    """The enqueues of one phase, with buffers of their own."""

    def __init__(
        self,
        device: Device,
        embedding: Parts,
        layer: Parts,
        head: Parts,
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
        scratch = device.allocate(scratch_bytes(embedding, layer, head))
        self._inputs: dict[str, tuple[int, tuple[int, ...]]] = {}
        hidden = binding_of(layer[0][0], "h")
        streams = [device.allocate(size_of(hidden)) for _ in range(2)]
        self._steps: list[Step] = []

        own = {"tokens": self._input(embedding, "tokens"), "h": streams[0]}
        if communicator is not None:
            own["first"] = self._input(embedding, "first")
        self._add(embedding, scratch, [own], weights, sums=streams[:1])  # its sum is h
        start = self._input(layer, "start")
        sums: list[int] = []
        between: dict[str, int] = {}
        if len(layer) > 1:
            sums = [device.allocate(size_of(hidden)) for _ in range(2)]
            between = self._between(layer)
        self._add(
            layer,
            scratch,
            [
                {
                    "h": streams[number % 2],
                    "h_out": streams[(number + 1) % 2],
                    "start": start,
                    **cache,
                    **between,
                }
                for number, cache in enumerate(caches)
            ],
            weights,
            sums=sums,
        )
        logits = binding_of(head[0][0], "logits")
        self._logits = device.allocate(size_of(logits))
        on_host = device.host_memory(size_of(logits)).view(np.float32)
        self._logits_on_host = on_host.reshape(-1, logits.shape[-1])
        own = {"h": streams[len(caches) % 2], "logits": self._logits}
        if any(binding.name == "last" for binding in head[0][0].bindings):
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

    def _between(self, layer: Parts) -> dict[str, int]:
        """Return new memory for what later parts of a layer take of earlier ones, but sums."""
        found = {}
        for graph, _ in layer:
            for row in state_of(graph):
                if row.direction == "out" and row.name not in ("h_out", PARTIAL):
                    found[row.name] = self._device.allocate(size_of(row))
        return found

    def _input(self, parts: Parts, name: str) -> int:
        binding = binding_of(parts[0][0], name)
        address = self._device.allocate(size_of(binding))
        self._device.clear(address, size_of(binding))
        self._inputs[name] = (address, binding.shape)
        return address

    def _add(
        self,
        parts: Parts,
        scratch: int,
        runs: Sequence[Mapping[str, int]],
        weights: RankWeights,
        sums: Sequence[int] = (),
    ) -> None:
        """Add enqueues of one context of each part.

        Args:
            parts: of one graph.
            scratch: where its contexts work.
            runs: of the graph; for each the addresses of what is no weight, by name.
            weights: loaded.
            sums: where ranks are summed behind the parts, by turns; of no use if none are.
        """
        cut = any(row.name == PARTIAL for graph, _ in parts for row in graph.bindings)
        contexts = [engine.context(scratch) for _, engine in parts]
        if self._communicator is not None and parts[0][0].kind in SUMMING and not cut:
            for (graph, _), context in zip(parts, contexts, strict=True):
                self._communicator.join(context, f"{graph.kind} ({graph.phase})")
        for number, own in enumerate(runs):
            for place, (graph, _) in enumerate(parts):
                if cut:
                    own = {
                        **own,
                        PARTIAL: sums[place % len(sums)],
                        SUM: sums[(place - 1) % len(sums)],
                    }
                found = {**own, **weights.addresses(graph, number)}
                self._steps.append(
                    Step(contexts[place], graph, found, sums=self._sum_behind(graph, found))
                )

    def _sum_behind(
        self, graph: GraphRecord, addresses: Mapping[str, int]
    ) -> Callable[[int], None] | None:
        """Return what sums over the ranks behind a part, given a stream; None if nothing does."""
        for binding in graph.bindings:
            if binding.name == PARTIAL:
                assert self._communicator is not None
                elements = math.prod(binding.shape)
                return partial(
                    self._communicator.all_reduce, addresses[PARTIAL], elements, binding.dtype
                )
        return None


class Step:
    """One enqueue of a context.

    Rows of a cache lie one behind the other: a graph for one row is bound to the row it is for. A
    graph for all rows is only ever run for row 0.
    """

    def __init__(
        self,
        context: Context,
        graph: GraphRecord,
        addresses: Mapping[str, int],
        *,
        sums: Callable[[int], None] | None = None,
    ) -> None:
        """Take what is bound.

        Args:
            context: of the graph's plan.
            graph: that runs.
            addresses: of its inputs and outputs, by name; an output that aliases an input has
                that of the input.
            sums: what is enqueued behind it.
        """
        self._context = context
        self._sums = sums
        self._fixed: dict[str, int] = {}
        self._by_row: dict[str, tuple[int, int]] = {}
        for binding in graph.bindings:
            name = binding.aliases or binding.name
            if name in CACHES:
                self._by_row[binding.name] = (addresses[name], size_of(binding))
            else:
                self._fixed[binding.name] = addresses[name]

    def enqueue(self, stream: int, row: int = 0) -> None:
        """Bind everything, then enqueue."""
        for name, address in self._fixed.items():
            self._context.bind(name, address)
        for name, (address, length) in self._by_row.items():
            self._context.bind(name, address + row * length)
        self._context.enqueue(stream)
        if self._sums is not None:
            self._sums(stream)
