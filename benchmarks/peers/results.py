"""The results of all rounds in a file of lines, and what they say of each peer."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Results", "Row", "Spread"]

WIDEST = 0.15
FEWEST_ROUNDS = 5

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The values of a quantity in all rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return float(np.median(self.values))

    @property
    def is_wide(self) -> bool:
        """Whether the middle half spreads by more than 15 % of the median."""
        low, high = np.percentile(self.values, [25, 75])
        return bool(high - low > WIDEST * abs(self.median))

    def text(self, form: str) -> str:
        """Return the median, and the range behind it, each number in the format `form`."""
        low, high = min(self.values), max(self.values)
        if len(self.values) == 1:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({low:{form}}-{high:{form}})"


class Results:
    """Rows of `results.jsonl` that were measured with the same settings.

    Attributes:
        rows: by name of the peer and number of the round.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = dict(settings)
        self.rows: dict[str, dict[int, Row]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for row in map(json.loads, lines):
            if row["settings"] == self._settings:
                self._take(row)

    def add(self, peer: str, number: int, row: Row) -> None:
        """Write a row to the file."""
        whole = {"peer": peer, "round": number, "settings": self._settings, **row}
        with self._path.open("a") as file:
            file.write(json.dumps(whole) + "\n")
        self._take(whole)

    def has(self, peer: str, number: int) -> bool:
        """Return whether a peer was measured in a round."""
        return number in self.rows.get(peer, {})

    def spread(self, peer: str, value: Callable[[Row], float]) -> Spread:
        """Return a quantity of a peer in all its rounds."""
        return Spread(values=tuple(map(value, self.rows[peer].values())))

    def ratio(self, peer: str, other: str, value: Callable[[Row], float]) -> Spread | None:
        """Return a quantity of a peer by that of another in the same rounds; None without any."""
        ours, theirs = self.rows[peer], self.rows.get(other, {})
        common = ours.keys() & theirs.keys()
        if not common:
            return None
        return Spread(values=tuple(value(ours[n]) / value(theirs[n]) for n in sorted(common)))

    def all_rows(self) -> Iterable[Row]:
        """Return all rows."""
        return (row for rows in self.rows.values() for row in rows.values())

    def _take(self, row: Row) -> None:
        self.rows.setdefault(row["peer"], {})[row["round"]] = row
