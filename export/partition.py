"""Which tensor is cut on which axis for the ranks of a tensor-parallel group: plain data.

A matrix that a layer multiplies first is cut by columns, the one behind it by rows, so that a rank
needs nothing of the others between the two; the sum behind the second is an all-reduce. Rows are
cut between groups of scales. The table of the vocabulary is cut by its entries, for embedding and
head alike, since they are one tensor.
"""

from typing import Any

from numpy.typing import NDArray

from export_grok.config import RankConfig

__all__ = ["cut_axis", "part_of", "share"]

_BY_COLUMNS = ("attention.query", "attention.key", "attention.value", "experts.gate", "experts.up")
_BY_ROWS = ("attention.out", "experts.down")
_BY_ENTRY = {"embedding.weight": 0, "unembedding.weight": 1, "unembedding.scales": 1}


def cut_axis(name: str, shape: tuple[int, ...], rank: RankConfig) -> int | None:
    """Return the axis that ranks share evenly, rank r having the r-th part.

    Args:
        name: of the tensor in the weight index; `layers.N.` may be left away.
        shape: of the whole.
        rank: any one.

    Returns:
        The axis; None if every rank has the whole.
    """
    if rank.tensor_parallel == 1:
        return None
    if name.startswith("layers."):
        name = name.split(".", 2)[2]
    if name in _BY_ENTRY:
        return _BY_ENTRY[name]
    matrix, _, part = name.rpartition(".")
    if matrix in _BY_COLUMNS:
        return len(shape) - 1
    if matrix in _BY_ROWS:
        one_for_all = part == "scales" and rank.model.row_parallel_scale_groups == 1
        return None if one_for_all else len(shape) - 2
    return None


def share(shape: tuple[int, ...], axis: int | None, ranks: int) -> tuple[int, ...]:
    """Return the shape of one rank's part."""
    return tuple(
        length // ranks if axis == place else length for place, length in enumerate(shape)
    )


def part_of(whole: NDArray[Any], axis: int | None, rank: int, ranks: int) -> NDArray[Any]:
    """Return one rank's part of a tensor, a view; the whole if it is not cut."""
    if axis is None:
        return whole
    length = whole.shape[axis] // ranks
    return whole[(slice(None),) * axis + (slice(rank * length, (rank + 1) * length),)]
