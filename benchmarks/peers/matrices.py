"""The matrices of a checkpoint as the peers store them: [out, in], sums along the last axis."""

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.export.weights_to.values import Rows
from export_grok.weights import WeightIndex, WeightReader

__all__ = ["Matrices"]

TOP_CODE = 127


class Matrices:
    """Reads tensors of a checkpoint by the names of `export.parameters`.

    Attributes:
        config: of the model.
        index: where the tensors lie.
    """

    def __init__(self, config: GrokConfig, index: WeightIndex) -> None:
        self.config = config
        self.index = index
        self._reader = WeightReader(index.root)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as it is stored."""
        return self.index[name].shape

    def floats(self, name: str) -> NDArray[np.float32]:
        """Return a float32 tensor as it is stored."""
        return self._reader.read(self.index[name])

    def matrix(self, name: str, *index: int) -> Rows:
        """Return an int8 matrix, e.g. `layers.0.experts.up` of expert `index`."""
        weight, scales = (
            self._reader.read(self.index[f"{name}.{key}"].block(*index))
            for key in ("weight", "scales")
        )
        return Rows(
            codes=np.ascontiguousarray(weight.T),
            scales=np.ascontiguousarray(scales.T.astype(np.float32)),
        )

    def head(self) -> Rows:
        """Return the embedding as an int8 matrix, [V, M].

        Raises:
            ValueError: it is no product of int8 codes and one scale a row.
        """
        values = self.floats("embedding.weight")
        scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(TOP_CODE)
        head = Rows(codes=np.rint(values / scales).astype(np.int8), scales=scales)
        if not np.array_equal(head.values(), values):
            raise ValueError("the embedding is not int8 codes times a scale for each row")
        return head
