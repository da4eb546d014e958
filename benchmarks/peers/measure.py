"""What every peer goes through, in a process of its own; the result is one line of JSON.

This module needs numpy only: a peer may live in an environment without export-grok.
"""

import argparse
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["CONTEXT", "PREFILLS", "PROMPT", "Peer", "measure", "tokens_of"]

# Tokens of the prompts whose prefill is timed, of the one before the timed decode, and of the one
# whose logits are kept. CONTEXT is the room that every peer has in its cache.
PREFILLS = (128, 512)
BEFORE_DECODE = 32
PROMPT = 16
CONTEXT = 1024
SAMPLE_SECONDS = 0.05


class Peer(Protocol):
    """A loaded model with a cache for one row.

    Attributes:
        vocabulary: number of token ids.
        about: what computes, and with which versions, by name.
    """

    vocabulary: int
    about: dict[str, str]

    def forward(self, tokens: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Write the tokens into the cache behind `start` others; return the last one's logits."""


def tokens_of(vocabulary: int, count: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return `count` token ids: the same for all peers."""
    return np.random.default_rng(seed).integers(0, vocabulary, count)


def measure(load: Callable[[Path, int], Peer]) -> None:
    """Load a peer as the command line says, put it through everything, print the result.

    Args:
        load: from the model's path and the number of threads to the peer.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=64, help="to decode")
    parser.add_argument("--logits", type=Path, required=True, help="file to write them to")
    given = parser.parse_args()

    with _MemoryPeak() as memory:
        began = time.perf_counter()
        peer = load(given.model, given.threads)
        load_seconds = time.perf_counter() - began
        np.save(given.logits, _kept_logits(peer))  # warms up prefill and decode too
        peer.forward(tokens_of(peer.vocabulary, PREFILLS[0], seed=1), 0)
        prefills = {count: _prefill_seconds(peer, count) for count in PREFILLS}
    decode = _decode_seconds(peer, given.tokens)
    now = memory.sample()
    result = {
        "load_s": load_seconds,
        "prefill_s": prefills,
        "decode_ms": [1e3 * seconds for seconds in decode],
        "private_mb": memory.private / 1e6,
        "mapped_mb": now["RssFile"] / 1e6,
        "about": peer.about,
    }
    print(json.dumps(result))


def _kept_logits(peer: Peer) -> NDArray[np.float32]:
    """Return logits [1 + PROMPT, V]: of a prompt's end, then of each token fed by itself."""
    tokens = tokens_of(peer.vocabulary, PROMPT)
    rows = [peer.forward(tokens, 0)]
    rows += [peer.forward(tokens[place : place + 1], place) for place in range(PROMPT)]
    return np.stack(rows)


def _prefill_seconds(peer: Peer, count: int) -> float:
    tokens = tokens_of(peer.vocabulary, count, seed=2)
    began = time.perf_counter()
    peer.forward(tokens, 0)
    return time.perf_counter() - began


def _decode_seconds(peer: Peer, count: int) -> list[float]:
    tokens = tokens_of(peer.vocabulary, BEFORE_DECODE + count, seed=3)
    peer.forward(tokens[:BEFORE_DECODE], 0)
    seconds = []
    for place in range(BEFORE_DECODE, len(tokens)):
        began = time.perf_counter()
        peer.forward(tokens[place : place + 1], place)
        seconds.append(time.perf_counter() - began)
    return seconds


class _MemoryPeak:
    """The most memory of its own this process had, looked at by a thread within the block.

    What is mapped from files is no such peak: the system takes it back when it needs the room.
    """

    def __init__(self) -> None:
        self.private = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_MemoryPeak":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()

    def sample(self) -> dict[str, int]:
        """Return what the process has now, in bytes, by the names of /proc/self/status."""
        status = Path("/proc/self/status").read_text()
        found = {name: int(kb) << 10 for name, kb in re.findall(r"(Rss\w+):\s+(\d+) kB", status)}
        self.private = max(self.private, found["RssAnon"])
        return found

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            self.sample()
