"""Compare what two sides computed in one step: only where tokens count and slots were written."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.export.contract import CACHE_OF
from export_grok.runtime.verify.choice import Experts, choice
from export_grok.runtime.verify.deviation import Statistic, Tokens, touched
from export_grok.runtime.verify.result import Deviation
from export_grok.runtime.verify.steps import Step
from export_grok.runtime.verify.tolerances import BFLOAT16_FACTOR, TENSORS, Tolerances

__all__ = ["Findings", "beside", "compared"]

Arrays = Mapping[str, NDArray[Any]]

# They follow from the choice of experts, so they say nothing where that was a near tie.
AFTER_CHOICE = ("gates", "moe", "h_out")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """One step of one graph, compared.

    Attributes:
        deviations: by the order of computing.
        choices: tokens whose experts were compared.
        flips: where others were chosen.
        near_ties: flips that are no fault.
    """

    deviations: tuple[Deviation, ...]
    choices: int = 0
    flips: int = 0
    near_ties: int = 0


def compared(
    found: Arrays,
    wanted: Arrays,
    step: Step,
    inputs: Arrays,
    tolerances: Tolerances,
    *,
    statistic: Statistic = "largest",
) -> Findings:
    """Compare the tensors that both sides give.

    Args:
        found: outputs and taps of the engine.
        wanted: of the reference.
        step: that both were fed.
        inputs: of the graph; slots of the caches that were not written must stay as they are here.
        tolerances: that are allowed.
        statistic: over tokens: the largest error, or the mean of their root mean squares.

    Raises:
        ValueError: a tensor of one side has another shape than that of the other.
    """
    names = [name for name in TENSORS if name in found and name in wanted]
    for name in names:
        shape, right = found[name].shape, wanted[name].shape
        if shape != right:
            raise ValueError(f"{name} has shape {shape}, the reference's {right}")
    kept = np.ones(int(step.length.sum()), np.bool_)
    deviations = []
    choices = flips = near_ties = 0
    if "experts" in names:
        experts = Experts.of(found, wanted, step)
        near = experts.near(tolerances.near_tie)
        kept = ~(experts.differ & near)
        choices, flips = len(experts.differ), int(experts.differ.sum())
        near_ties = int((experts.differ & near).sum())
        found, wanted = experts.sorted_gates(found), experts.sorted_gates(wanted)
    for name in names:
        allowed = tolerances.tensors[name]
        if name == "experts":
            deviations.append(choice(experts, near, step, allowed))
            continue
        one = Tokens.of(name, found[name], wanted[name], step)
        if name in AFTER_CHOICE:
            one = one.only(kept)
        deviations.append(one.deviation(step.name, allowed, statistic))
        if name in CACHE_OF and CACHE_OF[name] in inputs:
            deviations += touched(name, found[name], inputs[CACHE_OF[name]], step)
    return Findings(
        deviations=tuple(deviations), choices=choices, flips=flips, near_ties=near_ties
    )


def beside(found: Sequence[Findings], floor: Sequence[Findings]) -> list[Findings]:
    """Return an engine's findings with tolerances made of what roundings alone do.

    A step of few tokens may happen to be hit by less than others; then the mean of all steps is
    what roundings do. Where they leave no finite number they excuse nothing.

    Args:
        found: of an engine that is not float32, step by step, by the mean over tokens.
        floor: of a computation in its dtype that rounds wherever the original does.
    """
    every: dict[str, list[float]] = {}
    for step in floor:
        for one in step.deviations:
            if np.isfinite(one.error):
                every.setdefault(one.tensor, []).append(one.error)
    usual = {tensor: float(np.mean(errors)) for tensor, errors in every.items()}
    judged = []
    for step, rounded in zip(found, floor, strict=True):
        noise = usual | {
            one.tensor: max(one.error, usual[one.tensor])
            for one in rounded.deviations
            if np.isfinite(one.error)
        }
        deviations = tuple(
            dataclasses.replace(
                one, tolerance=one.tolerance + BFLOAT16_FACTOR * noise.get(one.tensor, 0.0)
            )
            for one in step.deviations
        )
        judged.append(dataclasses.replace(step, deviations=deviations))
    return judged
