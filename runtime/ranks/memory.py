"""The memory that all ranks and their parent see: nothing large goes through a socket.

It is one file without a name (`memfd_create`), mapped by each process. Its parts are as long as
the longest forward needs, and take pages from the system when they are first written:

    tokens   int64   [B, T]             the parent's
    parts    float32 [ranks, B, T, W]   of a sum, one for each rank
    total    float32 [B, T, W]          the parent's
    logits   float32 [ranks, B, T, V / ranks]
"""

import math
import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.errors import ConfigError

__all__ = ["GroupSizes", "RankMemory", "shared_file"]


@dataclass(frozen=True, kw_only=True)
class GroupSizes:
    """What the lengths of the memory follow from.

    Attributes:
        ranks: how many there are.
        batch: rows, B.
        max_length: slots of a row, T.
        width: of the residual stream, W.
        vocabulary: V, a multiple of the ranks.

    Raises:
        ConfigError: there are no rows, or no slots.
    """

    ranks: int
    batch: int
    max_length: int
    width: int
    vocabulary: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_length < 1:
            raise ConfigError(
                f"batch is {self.batch}, max_length {self.max_length}; both must be 1 or more"
            )

    @property
    def stream(self) -> int:
        """Numbers in a part of a sum."""
        return self.batch * self.max_length * self.width

    @property
    def logits(self) -> int:
        """Numbers in a rank's share of the logits."""
        return self.batch * self.max_length * (self.vocabulary // self.ranks)

    @property
    def tokens(self) -> int:
        """Numbers in the tokens."""
        return self.batch * self.max_length

    @property
    def nbytes(self) -> int:
        """Length of the memory."""
        return 8 * self.tokens + 4 * ((self.ranks + 1) * self.stream + self.ranks * self.logits)


def shared_file(sizes: GroupSizes) -> int:
    """Return the descriptor of a new file for the memory; it is gone when all have closed it."""
    descriptor = os.memfd_create("export-grok ranks")
    os.ftruncate(descriptor, sizes.nbytes)
    return descriptor


class RankMemory:
    """The parts of the memory, as arrays of the shapes that are asked for.

    Args:
        descriptor: of the file, which may be closed afterwards.
        sizes: of the group.
    """

    def __init__(self, descriptor: int, sizes: GroupSizes) -> None:
        self.sizes = sizes
        mapped = mmap.mmap(descriptor, sizes.nbytes)
        self._tokens = np.frombuffer(mapped, np.int64, sizes.tokens)
        floats = np.frombuffer(mapped, np.float32, offset=8 * sizes.tokens)
        streams, logits = np.split(floats, [(sizes.ranks + 1) * sizes.stream])
        *self._parts, self._total = streams.reshape(sizes.ranks + 1, -1)
        self._logits = logits.reshape(sizes.ranks, -1)

    def tokens(self, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Return where the tokens of a forward are."""
        return self._tokens[: math.prod(shape)].reshape(shape)

    def part(self, rank: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return where a rank's part of a sum is."""
        return _begin(self._parts[rank], shape)

    def total(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return where a sum is."""
        return _begin(self._total, shape)

    def logits(self, rank: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return where a rank's share of the logits is."""
        return _begin(self._logits[rank], shape)

    def add(self, shape: tuple[int, ...]) -> None:
        """Sum the parts in the order of their ranks, in float32: the same sum each time."""
        total = self.total(shape)
        np.copyto(total, self.part(0, shape))
        for rank in range(1, self.sizes.ranks):
            total += self.part(rank, shape)


def _begin(flat: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    return flat[: math.prod(shape)].reshape(shape)
