"""What reading weights has found: one thing a line, with its place.

"wrong" is what no trained model holds: a file was cut, overwritten or converted amiss. "doubtful"
is what a sound model might hold, though hardly any does, or what nothing could be held to.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from export_grok.weights import Weight

__all__ = ["Finding", "Kind", "Level", "counted", "index_of"]

Level = Literal["wrong", "doubtful"]

Kind = Literal[
    "file",  # missing, cut, of another shape, changed since a bundle was made, unreadable
    "hash",  # other bytes than were published or stored, or none to hold them to
    "nan",  # NaN or infinity
    "zeros",  # nothing but zeros, where something must be
    "hole",  # a long run of zeros among values
    "scale",  # scales that are absurd, or that contradict their codes
    "saturated",  # many codes at the ends of their range
    "equal",  # matrices that are the same byte for byte
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        level: how bad.
        kind: what sort of thing.
        text: what was found, to be read after file and tensor.
        file: below the folder that was checked, or the whole path of one elsewhere; empty if
            `text` names it, or it is about several.
        tensor: its name; empty if it is about a file.
        count: how many values, rows, bytes or matrices it is about.
        index: where the first of them is in the tensor.
        offset: of the first of them in the file, in bytes.
    """

    level: Level
    kind: Kind
    text: str
    file: str = ""
    tensor: str = ""
    count: int | None = None
    index: tuple[int, ...] | None = None
    offset: int | None = None

    @classmethod
    def of(cls, weight: Weight, level: Level, kind: Kind, text: str, **more: Any) -> "Finding":
        """Return what was found in a tensor; who reads the file says what it is called."""
        return cls(level=level, kind=kind, text=text, tensor=weight.name, **more)

    def __str__(self) -> str:
        """Return it as a line."""
        place = " ".join(part for part in (self.file, self.tensor) if part)
        return f"{place}: {self.text}" if place else self.text

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON values."""
        return dataclasses.asdict(self)


def index_of(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index in an array of `shape` of its element `number`; numpy has fewer axes."""
    index = []
    for length in reversed(shape):
        number, place = divmod(number, length)
        index.append(place)
    return tuple(reversed(index))


def counted(count: int, noun: str) -> str:
    """Return a number of things in words, e.g. "1 row", "1,234 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
