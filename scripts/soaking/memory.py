"""Memory of this process over a long run: sampled, and the slope of its end."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

__all__ = ["Memory", "anonymous_bytes"]

ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass
class Memory:
    """Samples the process's own memory while the block runs.

    Attributes:
        every: seconds between two samples.
        seconds: when each was taken.
        bytes: that were the process's own then: what the system cannot take back.
    """

    every: float
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def __enter__(self) -> "Memory":
        self._over = threading.Event()
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> float:
        """Bytes a minute over the last two thirds of the samples, by least squares."""
        first = len(self.bytes) // 3
        if len(self.bytes) - first < 2:
            return 0.0
        slope = np.polyfit(self.seconds[first:], self.bytes[first:], 1)[0]
        return 60 * float(slope)

    def _sample(self) -> None:
        while True:
            self.seconds.append(time.perf_counter() - self._began)
            self.bytes.append(anonymous_bytes())
            if self._over.wait(self.every):
                return


def anonymous_bytes() -> int:
    """Return the memory of this process that is no file's."""
    for line in ROLLUP.read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{ROLLUP} says nothing of anonymous memory")
