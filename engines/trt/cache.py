"""Keys and values of all layers on the device: rows of tokens, and how far each one is written."""

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.device import Device
from export_grok.engines.trt.record import GraphRecord
from export_grok.engines.trt.tensors import CACHES, ELEMENTS, binding_of, size_of

__all__ = ["RowCache", "cache_bytes"]


def cache_bytes(layer: GraphRecord, layers: int) -> int:
    """Return the bytes of so many layers' caches, as a graph for all rows has them."""
    return layers * sum(size_of(binding_of(layer, name)) for name in CACHES)


class RowCache:
    """The caches [B, Hkv, T, D] of all layers.

    A row's end is where its next token would go. What lies behind it is of no use to anyone: the
    padding of a piece, or the token that a row was given while it was parked.

    Attributes:
        layers: addresses of each layer's caches, by the names of the graph's inputs.
    """

    def __init__(self, device: Device, layer: GraphRecord, layers: int) -> None:
        """Allocate the caches.

        Args:
            device: to hold them.
            layer: graph of the decode phase, which is for all rows.
            layers: how many there are.
        """
        self._device = device
        binding = binding_of(layer, CACHES[0])
        batch, self._heads, slots, size = binding.shape
        self._slot_bytes = size * ELEMENTS[binding.dtype].itemsize
        self._head_bytes = slots * self._slot_bytes
        self._ends = np.zeros(batch, np.int64)
        nbytes = size_of(binding)
        self.layers = [{name: self._zeros(nbytes) for name in CACHES} for _ in range(layers)]

    def end(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Take note where rows [R] end with the tokens that are about to be written [R]."""
        self._ends[rows] = ends

    def parked(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the next token of some rows, and where it goes, as a graph for all rows takes it.

        The other rows get token 0, written behind their ends: what they hold stays. There is a
        slot behind a row of `max_length` tokens too, `record.Sizes` sees to it.

        Args:
            rows: these [R].
            tokens: of them [R, 1].
            start: of them [R].

        Returns:
            Tokens [B, 1] and their places [B].
        """
        every = np.zeros((len(self._ends), 1), np.int64)
        every[rows] = tokens
        places = self._ends.copy()
        places[rows] = start
        return every, places

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens of a row those of another, in all layers, in stream order."""
        row_bytes = self._heads * self._head_bytes
        for layer in self.layers:
            for address in layer.values():
                self._device.copy_pieces(
                    address + target * row_bytes,
                    address + source * row_bytes,
                    pieces=self._heads,
                    nbytes=length * self._slot_bytes,
                    pitch=self._head_bytes,
                )
        self._ends[target] = length

    def _zeros(self, nbytes: int) -> int:
        """Return new memory: as it is found, it may hold NaN, which no masking by 0 takes away."""
        address = self._device.allocate(nbytes)
        self._device.clear(address, nbytes)
        return address
