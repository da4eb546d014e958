"""What `export-grok bench` found, as curves: the time of a decode step over what grows."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Curve", "Point", "points_of"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step of decoding at one setting, a figure for each round.

    Attributes:
        value: of what grows.
        seconds: of a step.
        expected: seconds in which the read ceiling of that moment brings the bytes of a step.
        step_bytes: that a step has to read.
        experts: how many different ones are counted in each layer.
        doubts: of the run of bench that this was measured in.
    """

    value: int
    seconds: tuple[float, ...]
    expected: tuple[float, ...]
    step_bytes: float
    experts: float
    doubts: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Measured by expected, the median of the rounds."""
        rounds = zip(self.seconds, self.expected, strict=True)
        return statistics.median(measured / expected for measured, expected in rounds)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How the time of a step grows.

    Attributes:
        name: of what grows.
        fixed: what stays as it is, in words.
        points: by what grows.
    """

    name: str
    fixed: str
    points: tuple[Point, ...]

    @property
    def doubts(self) -> list[str]:
        """Every doubt once, in the order of the points."""
        return list(dict.fromkeys(doubt for point in self.points for doubt in point.doubts))


def points_of(bench: dict[str, Any], values: Iterable[int]) -> tuple[Point, ...]:
    """Return a point for each decode setting of a run of bench.

    Args:
        bench: what `export-grok bench --json` printed.
        values: of what grows, one for each of them.
    """
    return tuple(
        Point(
            value=value,
            seconds=tuple(statistics.mean(sample["seconds"]) for sample in found["samples"]),
            expected=tuple(
                found["step_bytes"]["total"] / sample["ceiling"] for sample in found["samples"]
            ),
            step_bytes=found["step_bytes"]["total"],
            experts=found["step_bytes"]["experts_per_layer"],
            doubts=tuple(bench["doubts"]),
        )
        for value, found in zip(values, bench["decode"], strict=True)
    )
