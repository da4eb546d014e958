"""Made-up results of comparisons: sound ones, and ones with a mistake planted."""

import dataclasses
import random
from typing import Any

from export_grok.engines.probe import GraphName
from export_grok.runtime.verify.result import (
    Cause,
    Deviation,
    FreeRun,
    GraphResult,
    Place,
    Verification,
)

__all__ = ["broken", "deviation", "free_run", "sound", "with_deviation", "with_graph"]

LAYER = ("k_out", "v_out", "heads", "attention", "experts", "gates", "moe", "h_out")
ALLOWED = {"h": 1e-6, "experts": 0.0, "gates": 1e-5}
INDEX = {"k_out": (3, 17), "v_out": (1, 101), "logits": (40321,), "gates": (1,), "experts": (0,)}


def deviation(tensor: str, step: str, part: float, **fields: Any) -> Deviation:
    """Return a deviation whose error is `part` of the tolerance; what is given is taken."""
    allowed = ALLOWED.get(tensor, 4e-5)
    error = part if tensor == "experts" else part * allowed
    wanted = -0.7321
    values: dict[str, Any] = {
        "error": error,
        "tolerance": allowed,
        "largest": error * 1.1,
        "mean": error / 9,
        "median": error / 11,
        "share": 0.0 if part <= 1 else 0.64,
        "columns": None,
        "place": Place(
            row=1,
            position=29,
            index=INDEX.get(tensor, (1187,)),
            value=wanted + error * 1.1,
            wanted=wanted,
        ),
    }
    if tensor == "experts" and not part:
        values["place"] = None
    return Deviation(tensor=tensor, step=step, **(values | fields))


def steps(decoded: int) -> list[str]:
    """Return the names of two pieces of a prompt and single tokens."""
    return ["prefill 1", "prefill 2", *(f"decode {number + 1}" for number in range(decoded))]


def sound(layers: int = 3, decoded: int = 8, **fields: Any) -> Verification:
    """Return a comparison in which all is a part of what is allowed."""
    noise = random.Random(7)
    names = [GraphName(kind="layer", layer=layer) for layer in range(layers)]
    graphs = [
        GraphResult(
            graph=GraphName(kind="embedding"),
            deviations=tuple(deviation("h", step, 0.0) for step in steps(decoded)),
        )
    ]
    for name in names:
        level = {tensor: noise.uniform(0.04, 0.3) for tensor in LAYER} | {"experts": 0.0}
        found = [
            deviation(tensor, step, level[tensor] * noise.uniform(0.6, 1))
            for step in steps(decoded)
            for tensor in LAYER
        ]
        near = int(noise.random() < 0.2)
        graphs.append(
            GraphResult(
                graph=name, deviations=tuple(found), choices=142, flips=near, near_ties=near
            )
        )
    for kind in ("head", "head_all"):
        found = [deviation("logits", step, noise.uniform(0.02, 0.2)) for step in steps(decoded)]
        graphs.append(GraphResult(graph=GraphName(kind=kind), deviations=tuple(found)))
    values: dict[str, Any] = {
        "bundle": "build/demo-engine",
        "engine": "ONNX Runtime 1.32.0, native kernels (avx512)",
        "reference": "PyTorch reference, float32",
        "dtype": "float32",
        "layers": layers,
        "rows": (64, 51, 27),
        "decoded": decoded,
        "text": "the demo's evaluation text",
        "graphs": tuple(graphs),
        "free_run": free_run(decoded),
        "cause": None,
    }
    return Verification(**(values | fields))


def free_run(decoded: int = 8, **fields: Any) -> FreeRun:
    """Return a run that is right; what is given is taken."""
    noise = random.Random(8)
    values: dict[str, Any] = {
        "positions": 142,
        "error": {step: 1e-3 * noise.uniform(0.02, 0.1) for step in steps(decoded)},
        "mean_error": 1.4e-5,
        "beyond": 0,
        "allowed": 1,
        "tolerance": 1e-3,
        "top_1": 1.0,
        "undecided": 0,
        "firm": 0,
        "kl_mean": 3.2e-11,
        "kl_max": 8.9e-10,
        "perplexity": 14.2270913,
        "perplexity_wanted": 14.2270871,
        "greedy": 8,
        "parted": None,
        "margin": None,
    }
    return FreeRun(**(values | fields))


def with_graph(result: Verification, number: int, graph: GraphResult) -> Verification:
    """Return the comparison with another graph at a place."""
    graphs = (*result.graphs[:number], graph, *result.graphs[number + 1 :])
    return dataclasses.replace(result, graphs=graphs)


def broken(layers: int = 3, layer: int = 1, tensor: str = "moe", **fields: Any) -> Verification:
    """Return a comparison where a layer is wrong from a tensor on, and so are the logits."""
    result = sound(layers)
    graph = result.graphs[layer + 1]
    wrong = LAYER[LAYER.index(tensor) :]
    noise = random.Random(9)
    found = tuple(
        deviation(one.tensor, one.step, noise.uniform(1e3, 4e4), columns=fields.get("columns"))
        if one.tensor in wrong and one.tensor != "experts"
        else one
        for one in graph.deviations
    )
    failing = dataclasses.replace(
        with_graph(result, layer + 1, dataclasses.replace(graph, deviations=found)),
        free_run=free_run(
            error={step: noise.uniform(0.1, 0.9) for step in steps(8)},
            mean_error=0.12,
            beyond=131,
            top_1=0.57,
            undecided=4,
            firm=57,
            kl_mean=0.21,
            kl_max=2.9,
            perplexity=31.8,
            parted=(1, 3),
            margin=0.31,
            failures=(
                "the logits of 131 of 142 positions are off by more than 1.0e-03 of their rms, "
                "and 1 may be; most in decode 3, by 8.8e-01",
                "perplexity is 31.8000, the reference's 14.2271: they must be within 0.1%",
            ),
        ),
        cause=Cause(
            fault="gates-renormalised",
            title="The gates of the chosen experts are divided by their sum",
            error=0.21,
        ),
    )
    return failing


def with_deviation(result: Verification, number: int, found: Deviation) -> Verification:
    """Return the comparison with one tensor of one step of a graph replaced."""
    graph = result.graphs[number]
    deviations = tuple(
        found if (one.tensor, one.step) == (found.tensor, found.step) else one
        for one in graph.deviations
    )
    return with_graph(result, number, dataclasses.replace(graph, deviations=deviations))
