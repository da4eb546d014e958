"""Long runs of zero bytes in a stream: what a download leaves that was cut or preallocated."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.export.check.findings import Finding, counted
from export_grok.weights import Weight

__all__ = ["HOLE_BYTES", "ZeroRun", "ZeroRuns", "hole_finding", "words_of"]

# The shortest run that counts, 16 pages. Codes of a trained matrix are zero here and there, one
# in thirty or so; 65,536 of them one after the other were never written.
HOLE_BYTES = 64 << 10

WORD = 8
# One word in so many is looked at first. A run that counts covers some of these, wherever it is.
STRIDE = 512


@dataclass(frozen=True)
class ZeroRun:
    """Zero bytes from offset `start` to before `end`."""

    start: int
    end: int


class ZeroRuns:
    """Finds runs in bytes that come block after block.

    Attributes:
        found: the runs that have ended.
    """

    def __init__(self) -> None:
        self.found: list[ZeroRun] = []
        self._start: int | None = None  # of the zeros that what has come so far ends with

    def feed(self, offset: int, block: NDArray[np.uint8]) -> bool:
        """Take the bytes at `offset`, which follow those before; return whether any is not 0."""
        nonzero = _nonzero_words(words_of(block))
        if self._start is None:
            self._start = offset
        if not len(nonzero):
            return False
        self.end(offset + _end_of_zeros(block, nonzero[0]))
        # A run of so many bytes covers all but one of so many words, and bytes of two more.
        for place in np.flatnonzero(np.diff(nonzero) >= HOLE_BYTES // WORD):
            self._start = offset + _start_of_zeros(block, nonzero[place])
            self.end(offset + _end_of_zeros(block, nonzero[place + 1]))
        self._start = offset + _start_of_zeros(block, nonzero[-1])
        return True

    def end(self, offset: int) -> None:
        """Let no run go on beyond `offset`: what follows is no longer zero, or another matter."""
        if self._start is not None and offset - self._start >= HOLE_BYTES:
            self.found.append(ZeroRun(self._start, offset))
        self._start = None


def hole_finding(weight: Weight, runs: Sequence[ZeroRun]) -> Finding:
    """Return what runs of zeros in a tensor say."""
    length = sum(run.end - run.start for run in runs)
    first = runs[0].start
    return Finding.of(
        weight,
        "wrong",
        "hole",
        f"{counted(len(runs), 'run')} of zeros, {length:,} bytes, the first from byte {first:,} "
        "of the file: a download that was cut or preallocated leaves such",
        count=length,
        offset=first,
    )


def words_of(block: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return bytes as words, with zeros behind the last if they do not fill it."""
    spare = -len(block) % WORD
    padded = np.append(block, np.zeros(spare, np.uint8)) if spare else block
    return padded.view(np.uint64)


def _nonzero_words(words: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Return which words are not zero, or so many of them that all long gaps are there."""
    probes = words[::STRIDE]
    if not probes.all():
        return np.flatnonzero(words)
    last = STRIDE * (len(probes) - 1)
    return np.append(np.arange(0, last, STRIDE), last + np.flatnonzero(words[last:]))


def _end_of_zeros(block: NDArray[np.uint8], word: np.intp) -> int:
    """Return where the first byte of a word is that is not zero."""
    first = WORD * int(word)
    return first + int(np.flatnonzero(block[first : first + WORD])[0])


def _start_of_zeros(block: NDArray[np.uint8], word: np.intp) -> int:
    """Return where the zeros begin that a word, which has other bytes too, may end with."""
    first = WORD * int(word)
    return first + int(np.flatnonzero(block[first : first + WORD])[-1]) + 1
