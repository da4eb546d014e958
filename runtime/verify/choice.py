"""Which experts each token goes to: a choice that differs is a fault, unless it was a near tie."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.runtime.verify.result import Deviation, Place
from export_grok.runtime.verify.steps import Step

__all__ = ["Experts", "choice"]

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of the tokens that count, [tokens, C], by their numbers.

    Attributes:
        differ: where they are not the same set [tokens].
        loss: by how much those found are less probable than those wanted, for the reference, at
            the most [tokens]; infinite if it does not show probabilities.
    """

    found: NDArray[np.int64]
    wanted: NDArray[np.int64]
    differ: NDArray[np.bool_]
    loss: NDArray[np.float64]
    counts: NDArray[np.bool_]

    @classmethod
    def of(cls, found: Arrays, wanted: Arrays, step: Step) -> "Experts":
        """Return the choices of both sides for the tokens that count."""
        counts = step.counts
        chosen = [np.sort(side["experts"][counts], axis=-1) for side in (found, wanted)]
        loss = np.full(len(chosen[0]), np.inf)
        if "probabilities" in wanted:
            probabilities = wanted["probabilities"][counts].astype(np.float64)
            loss = _loss(chosen[0], chosen[1], probabilities)
        return cls(
            found=chosen[0],
            wanted=chosen[1],
            differ=(chosen[0] != chosen[1]).any(axis=-1),
            loss=loss,
            counts=counts,
        )

    def near(self, tie: float) -> NDArray[np.bool_]:
        """Return where the reference was nearly undecided between those wanted and found."""
        return self.loss < tie

    @staticmethod
    def sorted_gates(side: Arrays) -> Arrays:
        """Return the arrays with gates in the order of the experts' numbers.

        The order of the two is that of their probabilities, which may be nearly equal.
        """
        if "gates" not in side:
            return side
        order = np.argsort(side["experts"], axis=-1, kind="stable")
        return {**side, "gates": np.take_along_axis(side["gates"], order, axis=-1)}


def _loss(
    found: NDArray[np.int64], wanted: NDArray[np.int64], probabilities: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return `Experts.loss` of experts in order [tokens, C], by probabilities [tokens, E]."""
    last = probabilities.shape[-1] - 1
    of_found, of_wanted = (
        np.sort(np.take_along_axis(probabilities, np.clip(chosen, 0, last), axis=-1), axis=-1)
        for chosen in (found, wanted)
    )
    distinct = (found[:, 0] >= 0) & (found[:, -1] <= last) & (np.diff(found) > 0).all(axis=-1)
    return np.where(distinct, np.abs(of_wanted - of_found).max(axis=-1), np.inf)


def choice(experts: Experts, near: NDArray[np.bool_], step: Step, allowed: float) -> Deviation:
    """Return the choice of experts as a deviation: its error counts the firm flips."""
    wrong = experts.differ & ~near
    rows, places = np.nonzero(experts.counts)
    place = None
    if wrong.any():
        token = int(wrong.argmax())
        column = int((experts.found[token] != experts.wanted[token]).argmax())
        place = Place(
            row=int(rows[token]),
            position=int(step.positions[rows[token], places[token]]),
            index=(column,),
            value=float(experts.found[token, column]),
            wanted=float(experts.wanted[token, column]),
        )
    share = float(wrong.mean()) if len(wrong) else 0.0
    return Deviation(
        tensor="experts",
        step=step.name,
        error=float(wrong.sum()),
        tolerance=allowed,
        largest=float(wrong.any()),
        mean=share,
        median=float(np.median(wrong)) if len(wrong) else 0.0,
        share=share,
        columns=None,
        place=place,
    )
