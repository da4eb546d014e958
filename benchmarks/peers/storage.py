"""How a peer keeps the weights, and how many bytes of them a token reads."""

import math
from dataclasses import dataclass

from export_grok.config import GrokConfig
from export_grok.export.parameters import model_parameters
from export_grok.weights import NUMPY_DTYPES

__all__ = ["Storage", "bytes_per_token"]


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What a matrix is kept in.

    Attributes:
        weight: bytes of a weight.
        scale: bytes of a scale.
        block: columns that share a scale at the most; None if they are shared as in the release.
    """

    weight: int = 1
    scale: int
    block: int | None = None

    def nbytes(self, columns: int, rows: int, groups: int) -> int:
        """Return the length of a matrix [rows, columns] with `groups` groups of columns."""
        group = columns // groups
        # A block is a power of two, and no border between two scales cuts it.
        shared = group if self.block is None else min(self.block, group & -group)
        return rows * (columns * self.weight + columns // shared * self.scale)


def bytes_per_token(config: GrokConfig, matrices: Storage, head: Storage) -> int:
    """Return what decoding a token reads: the matrices it goes through, with scales, and vectors.

    Of the embedding it reads a row, of the cache a few kB for each token before it: neither is
    counted.

    Args:
        config: of the model.
        matrices: all of them but the head's.
        head: of the head's matrix.
    """
    total = head.nbytes(config.emb_size, config.vocab_size, 1)
    chosen = config.num_selected_experts
    for name, parameter in model_parameters(config).items():
        if parameter.groups is not None:
            *experts, columns, rows = parameter.shape
            count = chosen if experts else 1
            total += count * matrices.nbytes(columns, rows, parameter.groups)
        elif not name.endswith(".scales") and name != "embedding.weight":
            total += math.prod(parameter.shape) * NUMPY_DTYPES[parameter.dtype].itemsize
    return total
