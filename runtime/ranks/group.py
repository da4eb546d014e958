"""The group that a rank's session sums in: `engines.group.Group` by the parent's adding."""

import sys

import numpy as np
from numpy.typing import NDArray

from export_grok.runtime.ranks.channel import Channel, Message
from export_grok.runtime.ranks.memory import RankMemory

__all__ = ["RankGroup"]


class RankGroup:
    """One rank's view of its group.

    Attributes:
        rank: number of this one, from 0.
        ranks: how many there are.
    """

    def __init__(self, rank: int, memory: RankMemory, channel: Channel) -> None:
        self.rank = rank
        self.ranks = memory.sizes.ranks
        self._memory = memory
        self._channel = channel

    def partial(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return where this rank writes its part of the next sum."""
        return self._memory.part(self.rank, shape)

    def total(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return where it finds the sum, until it asks for the next."""
        return self._memory.total(shape)

    def all_reduce(self, shape: tuple[int, ...], where: str) -> None:
        """Say that this rank's part is written; return when the sum of all is there."""
        self._ask({"say": "sum", "shape": list(shape), "where": where})

    def broadcast(self, data: bytes | None, where: str) -> bytes:
        """Return what rank 0 has, once all ranks have asked."""
        told = None if data is None else data.hex()
        return bytes.fromhex(self._ask({"say": "data", "data": told, "where": where})["data"])

    def _ask(self, message: Message) -> Message:
        self._channel.send(message)
        answer = self._channel.receive()
        if answer is None:
            sys.exit()  # the parent is gone, and with it the work
        return answer
