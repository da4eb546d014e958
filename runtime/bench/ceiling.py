"""How fast this machine reads weights when it does nothing else: the bound of decode speed."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.plugins.kernels import native_kernels, read_streams
from export_grok.weights import WeightIndex, WeightReader

__all__ = ["Ceiling", "Reading"]

CHUNK = 8 << 20
# Far beyond any cache, and little enough to be in memory after one pass.
WINDOW = 4 << 30
SECONDS = 0.1

_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the threads read together.

    Attributes:
        cpu_seconds: processor time of all threads.
    """

    bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds

    @property
    def busy(self) -> float:
        """Cores that were at work, on average."""
        return self.cpu_seconds / self.seconds


class Ceiling:
    """The weights of a bundle, mapped into memory, and threads that do nothing but read them.

    The matrices and the embedding are cut into chunks of up to 8 MiB. A thread that is done takes
    the next chunk, so none waits for another. Of more than 4 GiB, evenly spread chunks are taken.
    They are read once when this is made: later readings find them in memory.

    Attributes:
        threads: that read.
        method: how a thread reads, in words.
    """

    def __init__(self, index: WeightIndex, threads: int) -> None:
        self.threads = threads
        native = native_kernels().library is not None
        self.method = "four streams a thread" if native else "numpy's sum in each thread"
        self._read: Callable[[_Bytes], Any] = read_streams if native else _sum
        self._chunks = _chunks(index)
        for chunk in self._chunks:
            self._read(chunk)
        self._turn = itertools.count()

    def reading(self) -> Reading:
        """Read for about 0.1 s; return how much it was."""
        gate = threading.Barrier(self.threads)
        began_cpu = process_time()
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                parts = [pool.submit(self._part, gate) for _ in range(self.threads)]
                done = [part.result() for part in parts]
            except BaseException:
                gate.abort()  # interrupted: nobody may wait for a thread that does not come
                raise
        cpu_seconds = process_time() - began_cpu
        return Reading(
            bytes=sum(count for _, _, count in done),
            seconds=max(end for _, end, _ in done) - min(began for began, _, _ in done),
            cpu_seconds=cpu_seconds,
        )

    def _part(self, gate: threading.Barrier) -> tuple[float, float, int]:
        """Return when a thread began, when it ended, and the bytes it read."""
        gate.wait()
        began = now = perf_counter()
        count = 0
        while now - began < SECONDS:
            chunk = self._chunks[next(self._turn) % len(self._chunks)]
            self._read(chunk)
            count += chunk.nbytes
            now = perf_counter()
        return began, now, count


def _chunks(index: WeightIndex) -> list[_Bytes]:
    reader = WeightReader(index.root)
    chunks = []
    for weight in index:
        # Scales and norms are as small as the call that reads them.
        if weight.dtype == "int8" or weight.name == "embedding.weight":
            flat = reader.read(weight).reshape(-1).view(np.uint8)
            chunks += [flat[first : first + CHUNK] for first in range(0, len(flat), CHUNK)]
    total = sum(chunk.nbytes for chunk in chunks)
    return chunks[:: -(-total // WINDOW)]


def _sum(chunk: _Bytes) -> None:
    # numpy copies numbers that are not aligned before it adds them.
    skipped = -chunk.ctypes.data % 8
    whole = chunk[skipped:]
    whole[: len(whole) // 8 * 8].view(np.int64).sum()
