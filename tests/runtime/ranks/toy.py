"""A model without weights for ranks: its logits come from sums, exact in float32, and it can fail.

What goes wrong is told by the environment, as JSON in TOY: {"rank": 1, "step": 3, "at": "layer 1,
experts", "do": "raise"}. Step 0 is the opening. Nothing heavy is imported: a rank starts at once.
"""

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.config import GrokConfig
from export_grok.engines.group import Group
from export_grok.errors import BundleError

__all__ = ["LAYERS", "expected", "open_toy"]

LAYERS = 2
MODULUS = 64


def matrices(config: GrokConfig) -> tuple[NDArray[np.float32], ...]:
    """Return whole numbers so small that every sum of products is exact: [V, W], [W, W]."""
    random = np.random.default_rng(5)
    width, vocabulary = config.emb_size, config.vocab_size
    table = random.integers(0, MODULUS, (vocabulary, width)).astype(np.float32)
    square = random.integers(-2, 3, (width, width)).astype(np.float32)
    return table, square


def expected(config: GrokConfig, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logits of every token [B, S, V], as one process computes them."""
    table, square = matrices(config)
    h = np.cumsum(table[tokens], axis=1) % MODULUS
    for _ in range(2 * LAYERS):
        h = (h + h @ square) % MODULUS
    return np.asarray(h @ table.T, np.float32)


class ToyRank:
    """A rank: it holds some rows of the square matrix, and some of the table for its logits."""

    def __init__(self, config: GrokConfig, group: Group, batch: int, max_length: int) -> None:
        self.prefill_rows = 1
        self._table, square = matrices(config)
        self._group = group
        width, vocabulary = config.emb_size // group.ranks, config.vocab_size // group.ranks
        self._rows = slice(group.rank * width, (group.rank + 1) * width)
        self._words = slice(group.rank * vocabulary, (group.rank + 1) * vocabulary)
        self._square = square[self._rows]
        self._cache = np.zeros((batch, max_length, config.emb_size), np.float32)
        self._step = 0

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32] | None:
        h = self._layers(tokens, start, np.arange(len(tokens)) if rows is None else rows)
        if last is None:
            return None
        return self._logits(h[np.arange(len(h)), last])

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        return self._logits(self._layers(tokens, start, np.arange(len(tokens))))

    def copy(self, source: int, target: int, length: int) -> None:
        self._step += 1
        misbehave(self._group.rank, self._step, "copy")
        self._cache[target, :length] = self._cache[source, :length]

    def _layers(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        self._step += 1
        check_broadcast(self._group)
        new = tokens.shape[1]
        found = []
        for row, first, ids in zip(rows, start, tokens, strict=True):
            self._cache[row, first : first + new] = self._table[ids]
            found.append(self._cache[row, : first + new].cumsum(axis=0)[first:])
        h = np.stack(found) % MODULUS
        for layer in range(LAYERS):
            for part in ("attention", "experts"):
                self._group.partial(h.shape)[:] = h[..., self._rows] @ self._square
                where = f"layer {layer}, {part}"
                changed = misbehave(self._group.rank, self._step, where)
                self._group.all_reduce(changed.get("shape", h.shape), changed.get("where", where))
                h = (h + self._group.total(h.shape)) % MODULUS
        return h

    def _logits(self, h: NDArray[np.float32]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = h @ self._table[self._words].T
        if misbehave(self._group.rank, self._step, "logits"):
            return logits[..., 1:]
        return logits


def open_toy(
    bundle: Bundle, group: Group, *, batch: int, max_length: int, threads: int
) -> ToyRank:
    """Open the rank, or fail as told."""
    print(f"toy {group.rank} of {group.ranks} with {threads} threads")
    misbehave(group.rank, 0, "start")
    check_broadcast(group)
    return ToyRank(bundle.config, group, batch, max_length)


def check_broadcast(group: Group) -> None:
    """Hold a broadcast to what rank 0 gives, if the environment asks for one."""
    if "share" in os.environ.get("TOY", ""):
        for data in (b"\0 of rank 0 \xff", b""):
            got = group.broadcast(data if group.rank == 0 else None, "some bytes")
            assert got == data


def misbehave(rank: int, step: int, at: str) -> dict[str, Any]:
    """Do what the environment says for this place; return what to ask for in its stead."""
    told = json.loads(os.environ.get("TOY", "{}"))
    time.sleep(told.get("pause", 0))
    if (told.get("rank", rank), told.get("step"), told.get("at")) != (rank, step, at):
        return {}
    match told["do"]:
        case "raise":
            raise ValueError("planted")
        case "refuse":
            raise BundleError("the planted bundle is damaged")
        case "exit":
            print("planted last words", file=sys.stderr, flush=True)
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "babble":
            os.write(int(sys.argv[1]), b"[1, 2")
        case "chatter":
            print("word " * 200_000, file=sys.stderr, flush=True)
        case "change":
            return dict(told["to"])
    return {}
