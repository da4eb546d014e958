"""A graph of the whole model, put together of what ranks compute one after the other.

What is summed behind a part is added in the order of ranks, as `runtime.ranks` adds it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.cut import PARTIAL, SUM
from export_grok.engines.probe import TAPS, Run

__all__ = ["SHARED", "Assembly", "RankedPart"]

Arrays = dict[str, NDArray[Any]]

# What each rank has a share of, by the axis that they share: heads, or entries of the vocabulary.
SHARED = {"k_cache": 1, "v_cache": 1, "k_out": 1, "v_out": 1, "heads": -1, "logits": -1}


@dataclass(frozen=True, kw_only=True)
class RankedPart:
    """A part of a graph, loaded.

    Attributes:
        runs: it, on each rank.
        inputs: names of what it takes.
        sums: taps that are the sum that it takes.
    """

    runs: Sequence[Run]
    inputs: Sequence[str]
    sums: Sequence[str] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Runs a graph of the whole model by ranks; seen from outside there are none.

    What every rank computes for itself, all of them alike, such as `gates`, `experts` and `h_out`,
    is NaN where ranks differ, and -1 for an expert: sums of such ranks mean nothing, whichever of
    them is right, and a comparison must see it.

    Attributes:
        parts: of it, in order.
        outputs: names of what it gives, but taps; the first is a sum if the graph ends in one.
        entries: of the vocabulary that each rank has.
    """

    parts: Sequence[RankedPart]
    outputs: Sequence[str]
    entries: int

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return outputs and taps."""
        ranks = self._shared(inputs)
        for part in self.parts:
            for run, values in zip(part.runs, ranks, strict=True):
                for tap in part.sums:
                    values[tap] = values[SUM]
                values |= run({name: values[name] for name in part.inputs})
            if PARTIAL in ranks[0]:
                total = functools.reduce(np.add, [values.pop(PARTIAL) for values in ranks])
                for values in ranks:
                    values[SUM] = total
        if self.outputs[0] not in ranks[0]:  # the graph ends in a sum
            for values in ranks:
                values[self.outputs[0]] = values[SUM]
        names = [name for name in (*self.outputs, *TAPS) if name in ranks[0]]
        return {name: _joined(name, [values[name] for values in ranks]) for name in names}

    def _shared(self, inputs: Mapping[str, NDArray[Any]]) -> list[Arrays]:
        """Return what each rank is given."""
        count = len(self.parts[0].runs)
        ranks: list[Arrays] = [
            {**inputs, "first": np.array([rank * self.entries])} for rank in range(count)
        ]
        for name in SHARED.keys() & inputs.keys():
            shares = np.split(inputs[name], count, axis=SHARED[name])
            for values, share in zip(ranks, shares, strict=True):
                values[name] = share
        return ranks


def _joined(name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the shares of all ranks as one; or what all have, and no number where they differ."""
    if name in SHARED:
        return np.concatenate(arrays, axis=SHARED[name])
    first = arrays[0]
    alike = np.all([array == first for array in arrays], axis=0)
    return np.where(alike, first, first.dtype.type(np.nan if first.dtype.kind == "f" else -1))
