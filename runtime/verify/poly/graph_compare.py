"""The comparison of a graph's runners in polygraphy's command: its reference, and what it says."""

import math
from collections import OrderedDict
from typing import Any

from polygraphy.comparator import IterationResult
from polygraphy.logger import G_LOGGER

from export_grok.optional import require
from export_grok.runtime.verify.comparison import Findings, beside
from export_grok.runtime.verify.poly.compare import Arrays, ProbeCompare
from export_grok.runtime.verify.poly.data import StepInputs
from export_grok.runtime.verify.poly.graph_file import plain_errors
from export_grok.runtime.verify.poly.graph_runners import REFERENCE
from export_grok.runtime.verify.result import Deviation
from export_grok.runtime.verify.tolerances import tolerances_of

__all__ = ["GraphCompare"]


class GraphCompare(ProbeCompare):
    """Compares what both of two runners give, where tokens count and slots were written.

    The reference is `grok-ref` if it is one of the two, else the first. Tolerances are those of
    `export-grok verify`: for a graph that is not float32, by how far a computation in its dtype
    that rounds wherever the original does is from the reference.
    """

    def __init__(self, inputs: StepInputs) -> None:
        """Take what the runners are fed."""
        manifest = inputs.file.bundle.manifest
        super().__init__(
            inputs.steps,
            inputs.__getitem__,
            tolerances_of(manifest.config, manifest.dtype),
            statistic="largest" if manifest.dtype == "float32" else "mean",
        )
        self._file = inputs.file
        self._floor: list[Findings] = []
        self._said: set[str] = set()

    def __call__(
        self, first: IterationResult, second: IterationResult
    ) -> "OrderedDict[str, bool]":
        """Compare one step; return for each tensor whether it is within its tolerance."""
        reference, engine = first, second
        if second.runner_name == REFERENCE:
            reference, engine = second, first
        step = len(self.findings.get((reference.runner_name, engine.runner_name), ()))
        passed = super().__call__(reference, engine)
        self._say_left_out(reference, engine)
        found = self.findings[reference.runner_name, engine.runner_name][step]
        for one in found.deviations:
            _say(one)
        if found.near_ties:
            G_LOGGER.info(
                f"experts: {found.near_ties} of {found.choices} tokens chose others where the "
                "reference is nearly undecided; gates, moe and h_out are not compared there"
            )
        for name in _misshapen(reference, engine):
            shapes = [one[name].shape for one in (engine, reference)]
            G_LOGGER.error(
                f"FAILED | {name} has shape {shapes[0]} of {engine.runner_name}, and "
                f"{shapes[1]} of {reference.runner_name}: were both given the same inputs?"
            )
            passed[name] = False
        if not passed:
            G_LOGGER.error(
                f"FAILED | {engine.runner_name} and {reference.runner_name} have no output in "
                "common"
            )
            passed["common outputs"] = False
        return passed

    def _compared(self, found: Arrays, wanted: Arrays, number: int) -> Findings:
        differ = _misshapen(found, wanted)
        alike = {name: array for name, array in found.items() if name not in differ}
        findings = super()._compared(alike, wanted, number)
        if self._file.bundle.manifest.dtype == "float32":
            return findings
        if len(self._floor) < len(self._steps):  # of given inputs, one more with every step
            self._floor = self._roundings()
        return beside([findings] * len(self._floor), self._floor)[number]

    def _roundings(self) -> list[Findings]:
        """Return what rounding wherever the original does comes to, step by step."""
        with plain_errors():
            require("torch", extra="verify")
        from export_grok.runtime.torch_probe import TorchProbe

        bundle, graph = self._file.bundle, self._file.graph
        with (
            TorchProbe.of_bundle(bundle).graph(graph) as exact,
            TorchProbe.of_bundle(bundle, bundle.manifest.dtype).graph(graph) as rounded,
        ):
            return [
                super(GraphCompare, self)._compared(rounded(feed), exact(feed), number)
                for number, feed in enumerate(map(self._inputs, range(len(self._steps))))
            ]

    def _say_left_out(self, reference: IterationResult, engine: IterationResult) -> None:
        """Say once what only one of the two gives."""
        for one, other in ((reference, engine), (engine, reference)):
            names = ", ".join(name for name in one if name not in other)
            text = f"not compared, as only {one.runner_name} gives it: {names}"
            if names and text not in self._said:
                self._said.add(text)
                G_LOGGER.info(text)


def _misshapen(one: Any, other: Any) -> list[str]:
    """Return what both give, but not in the same shape."""
    return [name for name in one if name in other and one[name].shape != other[name].shape]


def _say(one: Deviation) -> None:
    text = f"{one.tensor:9} | error {one.error:.2g} of {one.tolerance:.2g} allowed"
    if math.isinf(one.error) and not one.tolerance:
        text = f"{one.tensor:9} | written where no token of this step is"
    if one.passed:
        G_LOGGER.finish(f"PASSED | {one.step:9} | {text}")
        return
    if one.place is not None:
        place = one.place
        text += (
            f"; the worst in row {place.row}, position {place.position}, at "
            f"{list(place.index)}: {place.value:.7g}, the reference has {place.wanted:.7g}"
        )
    G_LOGGER.error(f"FAILED | {one.step:9} | {text}")
