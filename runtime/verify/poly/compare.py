"""The comparison of one graph as polygraphy calls it, step by step."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.comparator import BaseCompareFunc, IterationResult

from export_grok.runtime.verify.comparison import Findings, compared
from export_grok.runtime.verify.deviation import Statistic
from export_grok.runtime.verify.result import Deviation
from export_grok.runtime.verify.steps import Step
from export_grok.runtime.verify.tolerances import Tolerances

__all__ = ["Arrays", "ProbeCompare"]

Arrays = Mapping[str, NDArray[Any]]


class ProbeCompare(BaseCompareFunc):  # type: ignore[misc]  # polygraphy has no types
    """Compares iterations that are steps; the first runner of a pair is the reference.

    Polygraphy tells a comparison nothing of the inputs: which step an iteration is, is known by
    counting, for each pair of runners on its own.

    Attributes:
        findings: by the names of the two runners, of each step so far.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Callable[[int], Arrays],
        tolerances: Tolerances,
        *,
        statistic: Statistic = "largest",
    ) -> None:
        """Take what the runners are fed.

        Args:
            steps: in their order.
            inputs: gives those of a step by its number.
            tolerances: that are allowed.
            statistic: over tokens, see `runtime.verify.deviation.compared`.
        """
        self.findings: dict[tuple[str, str], list[Findings]] = {}
        self._steps = steps
        self._inputs = inputs
        self._tolerances = tolerances
        self._statistic: Statistic = statistic

    def __call__(
        self, reference: IterationResult, engine: IterationResult
    ) -> "OrderedDict[str, bool]":
        """Compare one step; return for each tensor whether it is within its tolerance."""
        done = self.findings.setdefault((reference.runner_name, engine.runner_name), [])
        number = len(done) % len(self._steps)
        found = self._compared(_arrays(engine), _arrays(reference), number)
        done.append(found)
        return OrderedDict(
            (tensor, all(one.passed for one in found.deviations if one.tensor == tensor))
            for tensor in _tensors(found.deviations)
        )

    def _compared(self, found: Arrays, wanted: Arrays, number: int) -> Findings:
        """Compare outputs of an engine with those wanted in a step."""
        return compared(
            found,
            wanted,
            self._steps[number],
            self._inputs(number),
            self._tolerances,
            statistic=self._statistic,
        )


def _arrays(result: IterationResult) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(result[name]) for name in result}


def _tensors(deviations: Sequence[Deviation]) -> list[str]:
    return list(dict.fromkeys(deviation.tensor for deviation in deviations))
