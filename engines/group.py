"""What a rank's session asks of the ranks beside it: a sum, in memory that all of them see."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Group"]


class Group(Protocol):
    """The ranks that share a model, seen from one of them.

    Attributes:
        rank: number of this one, from 0.
        ranks: how many there are.
    """

    rank: int
    ranks: int

    def partial(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return where this rank writes its part of the next sum."""

    def total(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return where it finds the sum, until it asks for the next."""

    def all_reduce(self, shape: tuple[int, ...], where: str) -> None:
        """Sum the parts of all ranks, in the order of their numbers.

        Args:
            shape: of the part and of the sum.
            where: what the sum is of, for the error that names a rank, e.g. "layer 3, attention".
        """

    def broadcast(self, data: bytes | None, where: str) -> bytes:
        """Return what rank 0 has, once all ranks have asked: it keeps them together, too.

        Args:
            data: on rank 0 up to some hundred bytes, none of them if only the wait counts; on
                every other rank None.
            where: what it is for, for the error that names a rank, e.g. "NCCL's id".
        """
