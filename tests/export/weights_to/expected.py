"""What others must find of a checkpoint, worked out from its bytes without the program's help."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.weights import WeightIndex, WeightReader

__all__ = ["MATRICES", "NORMS", "Model", "floats", "matrices", "turned"]

Model = tuple[GrokConfig, WeightIndex]

NORMS = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
MATRICES = (
    *(f"attention.{part}" for part in ("query", "key", "value", "out")),
    *(f"experts.{part}" for part in ("gate", "up", "down")),
)


def floats(index: WeightIndex, name: str) -> NDArray[np.float32]:
    """Return a float tensor, a matrix [out, in]; the embedding as it is."""
    values = WeightReader(index.root).read(index[name])
    return values.T if name.endswith("router.weight") else values


def turned(index: WeightIndex, name: str) -> NDArray[np.float32]:
    """Return the values of an int8 matrix, [.., out, in]."""
    reader = WeightReader(index.root)
    codes = reader.read(index[f"{name}.weight"]).astype(np.float32)
    scales = reader.read(index[f"{name}.scales"]).astype(np.float32)
    rows, groups = codes.shape[-2], scales.shape[-2]
    per_row = scales[..., np.arange(rows) // (rows // groups), :]
    return np.swapaxes(codes * per_row, -1, -2)


def matrices(config: GrokConfig) -> Iterator[tuple[int, str]]:
    """Yield the layer and the name of every int8 matrix."""
    return ((layer, name) for layer in range(config.num_layers) for name in MATRICES)
