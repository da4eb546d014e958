"""Why a graph is wrong: the reference makes each known mistake, until it agrees with the engine.

A mistake's signature is everything it does to a layer, so agreement within the tolerances in every
tensor and step is as good as proof: what else would have to be wrong in just that way?
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from export_grok.engines.probe import GraphName
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.comparison import Findings, compared
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.mistake import mistaken
from export_grok.runtime.verify.result import Cause, GraphResult
from export_grok.runtime.verify.steps import Step
from export_grok.runtime.verify.tolerances import Tolerances

__all__ = ["cause_of"]

Arrays = Mapping[str, NDArray[Any]]


def cause_of(
    result: GraphResult,
    inputs: Sequence[Arrays],
    outputs: Sequence[Arrays],
    steps: Sequence[Step],
    reference: TorchProbe,
    tolerances: Tolerances,
) -> Cause | None:
    """Return the known mistake that explains a failed graph; None if none does.

    Args:
        result: of the graph, failed.
        inputs: that it was fed, step by step.
        outputs: of the engine.
        steps: that were fed.
        reference: what is right.
        tolerances: that are allowed.
    """
    failed = result.first_failed
    if failed is None:
        return None
    # The step that failed first tells most suspects apart; the others are asked of who is left.
    order = sorted(range(len(steps)), key=lambda number: steps[number].name != failed.step)

    def error_of(probe: TorchProbe, graph: GraphName) -> float | None:
        worst = 0.0
        with probe.graph(graph) as run:
            for number in order:
                found = compared(
                    outputs[number],
                    run(inputs[number]),
                    steps[number],
                    inputs[number],
                    tolerances,
                )
                if not all(one.passed for one in found.deviations):
                    return None
                worst = max(worst, _worst(found))
        return worst

    causes = []
    for fault in _suspects(result.graph, failed.tensor):
        with mistaken(fault, reference) as wrong:
            error = error_of(wrong, result.graph)
        if error is not None:
            causes.append(Cause(fault=fault.name, title=fault.title, error=error))
    if causes:
        return min(causes, key=lambda cause: cause.error)
    return _other_layer(result.graph, failed.tensor, reference, error_of)


def _suspects(graph: GraphName, tensor: str) -> list[Fault]:
    kind = "head" if graph.kind == "head_all" else graph.kind
    return [
        fault
        for fault in FAULTS.values()
        if fault.mistake is not None and fault.graph == kind and fault.shows == tensor
    ]


def _other_layer(
    graph: GraphName,
    tensor: str,
    reference: TorchProbe,
    error_of: Callable[[TorchProbe, GraphName], float | None],
) -> Cause | None:
    """Return the cause if the engine computes with the weights of another layer.

    Then its first wrong tensor are the keys; for any other, no layer need be tried.
    """
    if graph.kind != "layer" or tensor != "k_out":
        return None
    for layer in range(reference.config.num_layers):
        if layer == graph.layer:
            continue
        error = error_of(reference, GraphName(kind="layer", layer=layer))
        if error is not None:
            return Cause(
                fault="another_layer",
                title=f"{graph} computes with the weights of layer {layer}",
                error=error,
            )
    return None


def _worst(found: Findings) -> float:
    return max((one.ratio for one in found.deviations), default=0.0)
