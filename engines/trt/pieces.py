"""How new tokens are cut into what a prefill plan takes at once: tokens of one row."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Piece", "pieces_of"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens `first` to `end` of a row."""

    row: int
    first: int
    end: int

    @property
    def width(self) -> int:
        """How many they are."""
        return self.end - self.first


def pieces_of(rows: int, tokens: int, *, chunk: int) -> Iterator[Piece]:
    """Cut new tokens [B, S] into pieces of up to `chunk` tokens, row by row."""
    for row in range(rows):
        for first in range(0, tokens, chunk):
            yield Piece(row=row, first=first, end=min(first + chunk, tokens))
