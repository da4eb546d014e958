"""Graphs bound to memory, one chain for each range of rows and number of new tokens.

A service meets many of both, so the memory of a step is one for all chains, as large as the
largest step needed until now; and only so many chains are kept as cost no memory to speak of.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Chain", "Chains", "Span", "Workspace"]

# Of 64 layers, one is bound in 2 to 4 ms and holds 0.25 MB. ONNX Runtime keeps little for each
# shape that it meets: after 500 of rows and tokens, in random order, a process held 1 to 2 MB more
# than after the first 100, with either kind of kernels.
KEPT: Final = 64


@dataclass(frozen=True)
class Span:
    """What a chain is bound to.

    Attributes:
        first: place of the first row in the cache.
        rows: how many there are, R.
        tokens: new ones of each, S.
    """

    first: int
    rows: int
    tokens: int

    def of(self, cache: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the rows' part [R, ...] of a cache [B, ...]: the same memory."""
        return cache[self.first : self.first + self.rows]


class Chain(Protocol):
    """Embedding and layers bound to their memory."""

    def run(self, tokens: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the residual stream behind the last layer; good until the next run of any."""


class Workspace:
    """Arrays by name, of which every step takes the beginning.

    Args:
        room: tokens of a step, all rows together.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._floats: dict[str, NDArray[np.float32]] = {}
        self._numbers = np.zeros((2, room), np.int64)

    def stream(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return an array [R, S, ...] of what goes from graph to graph."""
        each = math.prod(shape[2:])
        if name not in self._floats:
            self._floats[name] = np.zeros(self.room * each, np.float32)
        return self._floats[name][: math.prod(shape)].reshape(shape)

    def tokens(self, span: Span) -> NDArray[np.int64]:
        """Return where the tokens of a step go in, [R, S]."""
        return self._numbers[0, : span.rows * span.tokens].reshape(span.rows, span.tokens)

    def start(self, span: Span) -> NDArray[np.int64]:
        """Return where their places go in, [R]."""
        return self._numbers[1, : span.rows]


class Chains:
    """Keeps the chains that were last used, and the workspace of all."""

    def __init__(self) -> None:
        self._workspace = Workspace(0)
        self._kept: OrderedDict[Span, Chain] = OrderedDict()

    def of(self, span: Span, make: Callable[[Span, Workspace], Chain]) -> Chain:
        """Return the chain for a span; make it if there is none."""
        if span.rows * span.tokens > self._workspace.room:
            self._kept.clear()  # their addresses are those of the arrays that go now
            self._workspace = Workspace(span.rows * span.tokens)
        if span not in self._kept:
            self._kept[span] = make(span, self._workspace)
        self._kept.move_to_end(span)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[span]
