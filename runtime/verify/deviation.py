"""How far one tensor of one step is from what is wanted, and where."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from export_grok.export.contract import CACHE_OF
from export_grok.runtime.verify.result import Deviation, Place
from export_grok.runtime.verify.steps import Step

__all__ = ["Statistic", "Tokens", "token_errors", "touched"]

Statistic = Literal["largest", "mean"]

TINY = 1e-30


def token_errors(
    found: NDArray[Any], wanted: NDArray[Any], statistic: Statistic = "largest"
) -> NDArray[np.float64]:
    """Return the error of every token of [tokens, width], in rms of what is wanted."""
    distance = _distance(found, wanted)
    size = (
        distance.max(axis=-1, initial=0.0)
        if statistic == "largest"
        else np.sqrt(np.square(distance).mean(axis=-1))
    )
    errors: NDArray[np.float64] = size / _scale(wanted)[:, 0]
    return errors


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One tensor of the tokens that count, [tokens, width], and where they come from.

    Attributes:
        rows: of the batch [tokens].
        positions: in their rows [tokens].
        lengths: of the axes that the width is made of, e.g. heads and channels.
    """

    name: str
    found: NDArray[Any]
    wanted: NDArray[Any]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, name: str, found: NDArray[Any], wanted: NDArray[Any], step: Step) -> "Tokens":
        """Return the values of a tensor that belong to tokens that count."""
        rows, places = np.nonzero(step.counts)
        if name in CACHE_OF:
            slots = step.positions[rows, places]
            parts = [array[rows, :, slots] for array in (found, wanted)]
        elif name == "logits" and found.ndim == 2:  # of one token of each row
            rows = np.flatnonzero(step.length)
            places = step.last[rows]
            parts = [array[rows] for array in (found, wanted)]
        else:
            parts = [array[rows, places] for array in (found, wanted)]
        lengths = parts[0].shape[1:]
        shape = len(rows), math.prod(lengths)
        return cls(
            name=name,
            found=parts[0].reshape(shape),
            wanted=parts[1].reshape(shape),
            rows=rows,
            positions=step.positions[rows, places],
            lengths=lengths,
        )

    def only(self, kept: NDArray[np.bool_]) -> "Tokens":
        """Return some of the tokens."""
        return Tokens(
            name=self.name,
            found=self.found[kept],
            wanted=self.wanted[kept],
            rows=self.rows[kept],
            positions=self.positions[kept],
            lengths=self.lengths,
        )

    def deviation(self, step: str, allowed: float, statistic: Statistic) -> Deviation:
        """Return how far the tensor is off, over all tokens."""
        errors = token_errors(self.found, self.wanted, statistic)
        distance, scale = _distance(self.found, self.wanted), _scale(self.wanted)
        over_tokens = np.max if statistic == "largest" else np.mean
        error = float(over_tokens(errors)) if len(errors) else 0.0
        beyond = distance > allowed * scale
        return Deviation(
            tensor=self.name,
            step=step,
            error=error,
            tolerance=allowed,
            largest=float(distance.max(initial=0.0)),
            mean=float(distance.mean()) if distance.size else 0.0,
            median=float(np.median(distance)) if distance.size else 0.0,
            share=float(beyond.mean()) if beyond.size else 0.0,
            columns=_columns(beyond),
            place=self._place(distance / scale),
        )

    def _place(self, errors: NDArray[np.float64]) -> Place | None:
        if not errors.size:
            return None
        token, column = np.unravel_index(int(errors.argmax()), errors.shape)
        return Place(
            row=int(self.rows[token]),
            position=int(self.positions[token]),
            index=tuple(int(part) for part in np.unravel_index(int(column), self.lengths)),
            value=float(self.found[token, column]),
            wanted=float(self.wanted[token, column]),
        )


def touched(name: str, found: NDArray[Any], before: NDArray[Any], step: Step) -> list[Deviation]:
    """Return a deviation if a slot was changed that no token of the step, or padding, writes."""
    slots = np.arange(found.shape[2])
    end = step.start + step.tokens.shape[1]
    others = (slots < step.start[:, np.newaxis]) | (slots >= end[:, np.newaxis])
    same = (found == before) | (np.isnan(found) & np.isnan(before))
    changed = ~same.all(axis=(1, 3)) & others
    if not changed.any():
        return []
    row, slot = (int(part[0]) for part in np.nonzero(changed))
    distance = _distance(found[row, :, slot], before[row, :, slot])
    distance[same[row, :, slot]] = 0.0
    head, channel = np.unravel_index(int(distance.argmax()), distance.shape)
    return [
        Deviation(
            tensor=name,
            step=step.name,
            error=np.inf,
            tolerance=0.0,
            largest=float(distance.max()),
            mean=float(distance.mean()),
            median=float(np.median(distance)),
            share=float(changed.mean()),
            columns=None,
            place=Place(
                row=row,
                position=slot,
                index=(int(head), int(channel)),
                value=float(found[row, head, slot, channel]),
                wanted=float(before[row, head, slot, channel]),
            ),
        )
    ]


def _distance(found: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.float64]:
    """Return how far values are apart; infinitely where either is no finite number."""
    with np.errstate(invalid="ignore"):  # infinity less infinity
        distance = np.abs(found.astype(np.float64) - wanted)
    numbers: NDArray[np.float64] = np.nan_to_num(distance, nan=np.inf, posinf=np.inf)
    return numbers


def _scale(wanted: NDArray[Any]) -> NDArray[np.float64]:
    """Return the rms of every token of [tokens, width], [tokens, 1]; 1 where it is not finite."""
    rms = np.sqrt(np.square(wanted, dtype=np.float64).mean(axis=-1, keepdims=True))
    return np.where(np.isfinite(rms), np.maximum(rms, TINY), 1.0)


def _columns(beyond: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return the first and last column with a wrong value, if they leave half of all out."""
    columns = np.flatnonzero(beyond.any(axis=0)) if beyond.size else np.empty(0, np.int64)
    if not len(columns) or columns[-1] - columns[0] + 1 > beyond.shape[1] // 2:
        return None
    return int(columns[0]), int(columns[-1])
