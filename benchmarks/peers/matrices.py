"""The matrices of a checkpoint as the peers store them: [out, in], sums along the last axis."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.weights import WeightIndex, WeightReader

__all__ = ["Matrices", "Matrix"]

TOP_CODE = 127


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """An int8 matrix.

    Attributes:
        codes: int8 [N, K].
        scales: float32 [N, R]; those of column k are at k // (K / R).
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]

    def block_scales(self, size: int) -> NDArray[np.float32]:
        """Return the scale of every block of `size` columns, [N, K / size].

        Raises:
            ValueError: a block has columns of two scales.
        """
        group = self.codes.shape[1] // self.scales.shape[1]
        if group % size:
            raise ValueError(f"groups of {group} columns cannot be cut into blocks of {size}")
        return np.repeat(self.scales, group // size, axis=1)

    def dequantised(self) -> NDArray[np.float32]:
        """Return the values, [N, K]."""
        rows, groups = self.scales.shape
        values = self.codes.reshape(rows, groups, -1) * self.scales[..., None]
        return values.reshape(self.codes.shape)


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

    def matrix(self, name: str, *index: int) -> Matrix:
        """Return an int8 matrix, e.g. `layers.0.experts.up` of expert `index`."""
        weight, scales = (
            self._reader.read(self.index[f"{name}.{key}"].block(*index))
            for key in ("weight", "scales")
        )
        return Matrix(
            codes=np.ascontiguousarray(weight.T),
            scales=np.ascontiguousarray(scales.T.astype(np.float32)),
        )

    def head(self) -> Matrix:
        """Return the embedding as an int8 matrix, [V, M].

        Raises:
            ValueError: it is no product of int8 codes and one scale a row.
        """
        values = self.floats("embedding.weight")
        scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(TOP_CODE)
        head = Matrix(codes=np.rint(values / scales).astype(np.int8), scales=scales)
        if not np.array_equal(head.dequantised(), values):
            raise ValueError("the embedding is not int8 codes times a scale for each row")
        return head
