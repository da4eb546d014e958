"""What one rank holds of the weights, in device memory: read where they lie, by slices.

A tensor goes through one bounded piece of host memory, block by block, and is never whole there.
The table of the vocabulary, stored in float32, becomes the graph's dtype on the way. A tensor that
several graphs ask for alike - the table for embedding and heads, a layer for both phases - lies in
device memory once.

Ranks read different bytes, together each byte once. What the system reads from the disk is pages:
of a matrix that is cut by columns, with rows shorter than a page, it is more than that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.engines.probe import GraphName
from export_grok.engines.trt.device import Device
from export_grok.engines.trt.record import Binding, GraphRecord, TrtRecord
from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.errors import BundleError
from export_grok.export.contract import weight_prefix
from export_grok.export.head import head_index
from export_grok.export.partition import part_of
from export_grok.progress import progress_bar
from export_grok.weights import Weight, WeightIndex, WeightReader

__all__ = ["STAGING", "RankWeights", "Share"]

STAGING = 64 << 20

# Stored in float32 whatever the dtype of the graphs.
_TABLE = "embedding.weight"


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a stored tensor.

    Attributes:
        root: folder that the tensor's file is below.
        weight: the whole, as it is stored.
        cut: axis that ranks share; None for the whole.
        shape: of the part.
        dtype: of the part on the device.
    """

    root: Path
    weight: Weight
    cut: int | None
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Length on the device."""
        return math.prod(self.shape) * ELEMENTS[self.dtype].itemsize


class RankWeights:
    """Where each weight of each graph lies on the device, after `load`.

    Attributes:
        nbytes: that `load` allocates.
        bytes_read: of the files, so far.

    Raises:
        BundleError: tensors are missing, or not of the shape or dtype that the plans take; all are
            named.
    """

    def __init__(
        self,
        record: TrtRecord,
        index: WeightIndex,
        head: WeightIndex,
        *,
        layers: int,
        rank: int,
        only: GraphName | None = None,
    ) -> None:
        """Find every weight.

        Args:
            record: of the plans.
            index: of the weights of embedding and layers.
            head: of those of both heads; the same, or that of an int8 head.
            layers: how many there are.
            rank: whose part.
            only: the graph to find the weights of; None for all of them.
        """
        self._rank = rank
        self._ranks = record.sizes.tensor_parallel
        self._shares: dict[tuple[str, str, int, str], Share] = {}
        faults: dict[str, None] = {}  # in order, and once for both phases
        for graph in record.graphs:
            source = head if graph.kind.startswith("head") else index
            for layer in _layers_of(graph, layers, only):
                for binding in graph.bindings:
                    if binding.weight is not None:
                        share = self._share(graph, layer, binding, source, faults)
                        if share is not None:
                            self._shares[graph.kind, graph.phase, layer, binding.name] = share
        if faults:
            raise BundleError(
                "\n  ".join(
                    ["the plans are not of these weights, build the engine again:", *faults]
                )
            )
        self._addresses: dict[Share, int] = {}
        self.bytes_read = 0

    @classmethod
    def of_bundle(
        cls, bundle: Bundle, record: TrtRecord, *, rank: int = 0, only: GraphName | None = None
    ) -> "RankWeights":
        """Find every weight where a bundle has it.

        Args:
            bundle: with the plans.
            record: of them.
            rank: whose part.
            only: the graph to find the weights of; None for all of them.
        """
        config, index = bundle.config, bundle.index()
        int8 = bundle.manifest.head == "int8"
        head = head_index(config, bundle.head_root) if int8 else index
        return cls(record, index, head, layers=config.num_layers, rank=rank, only=only)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that they take."""
        return sum(share.nbytes for share in set(self._shares.values()))

    def addresses(self, graph: GraphRecord, layer: int = 0) -> dict[str, int]:
        """Return where the weights of a graph lie, by the names of its inputs."""
        return {
            binding.name: self._addresses[
                self._shares[graph.kind, graph.phase, layer, binding.name]
            ]
            for binding in graph.bindings
            if binding.weight is not None
        }

    def load(self, device: Device, *, staging: int = STAGING) -> None:
        """Read all of them into new memory of the device.

        Args:
            device: where to.
            staging: bytes of host memory that they go through.

        Raises:
            CheckpointError: a file is missing or too short.
            ConfigError: the device has not enough memory.
        """
        through = device.host_memory(staging)
        readers: dict[Path, WeightReader] = {}
        with progress_bar("loading weights", self.nbytes, unit="bytes") as advance:
            for share in dict.fromkeys(self._shares.values()):
                reader = readers.setdefault(share.root, WeightReader(share.root))
                part = part_of(reader.read(share.weight), share.cut, self._rank, self._ranks)
                address = self._addresses[share] = device.allocate(share.nbytes)
                dtype = ELEMENTS[share.dtype]
                for block in _blocks(part, staging // dtype.itemsize):
                    ready = through[: block.size * dtype.itemsize].view(dtype)
                    ready = ready.reshape(block.shape)
                    np.copyto(
                        ready, block, casting="unsafe"
                    )  # rounds to the nearest, ties to even
                    device.upload(address, ready)
                    address += ready.nbytes
                    self.bytes_read += block.nbytes
                    advance(ready.nbytes)

    def _share(
        self,
        graph: GraphRecord,
        layer: int,
        binding: Binding,
        index: WeightIndex,
        faults: dict[str, None],
    ) -> Share | None:
        """Return what a binding is filled with; None if that is a fault."""
        name = f"{weight_prefix(graph.kind, layer)}{binding.weight}"
        weight = index.weights.get(name)
        if weight is None:
            faults[f"{name} is missing"] = None
            return None
        whole = tuple(
            length * self._ranks if axis == binding.cut else length
            for axis, length in enumerate(binding.shape)
        )
        stored = "float32" if name == _TABLE else binding.dtype
        if weight.shape != whole or weight.dtype != stored:
            faults[
                f"{name} is {weight.dtype} {list(weight.shape)}; "
                f"the plans take {stored} {list(whole)}"
            ] = None
            return None
        return Share(
            root=index.root,
            weight=weight,
            cut=binding.cut,
            shape=binding.shape,
            dtype=binding.dtype,
        )


def _layers_of(graph: GraphRecord, layers: int, only: GraphName | None) -> Sequence[int]:
    """Return for which layers weights are found; 0 stands for a graph of no layer."""
    if only is None:
        return range(layers if graph.kind == "layer" else 1)
    return [only.layer or 0] if graph.kind == only.kind else []


def _blocks(array: NDArray[Any], limit: int) -> Iterator[NDArray[Any]]:
    """Cut an array into parts of up to `limit` elements, in the order of its elements."""
    if array.size <= limit:
        yield array
        return
    rows = limit // (array.size // len(array))
    if rows == 0:
        for part in array:
            yield from _blocks(part, limit)
        return
    for first in range(0, len(array), rows):
        yield array[first : first + rows]
