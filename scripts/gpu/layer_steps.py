"""Steps 2 to 5: the plans of a layer, built and checked on the GPU at hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from export_grok.engines.trt.callbacks import messages_of
from export_grok.engines.trt.engine import Engine, PlanRuntime
from export_grok.engines.trt.fit import check_engine
from export_grok.engines.trt.module import Flavour
from export_grok.engines.trt.tensors import size_of
from scripts.gpu.bandwidth import reading
from scripts.gpu.check import SPARE
from scripts.gpu.device import Gpu
from scripts.gpu.layer import LayerCase, Reference, graph_of, layer_cases, written_graph
from scripts.gpu.layer_capture import LAYERS, capture
from scripts.gpu.layer_checks import Build, Found, in_place, reformats, values
from scripts.gpu.plan_run import built_plan, flavour_here
from scripts.gpu.step import Options, Outcome

__all__ = ["check_caches", "check_capture", "check_formats", "check_values", "outcome"]

# Of a step: what is done with one case.
Check = Callable[[LayerCase], Found]


def check_values(options: Options) -> Outcome:
    """Step 2: plans with weights as inputs, held to ONNX Runtime."""
    gpu, build, random = _ready(options)
    found = _each(
        gpu,
        layer_cases(full=options.full),
        lambda case: values(gpu, case, build, random, Reference(case)),
    )
    worst = max((each.figures["h_out"] for each in found.values()), default=0.0)
    return outcome(found, f"{worst:.1e} is the largest error of a token")


def check_caches(options: Options) -> Outcome:
    """Step 3: caches are written in place."""
    gpu, build, random = _ready(options)
    cases = layer_cases(full=options.full)
    found = _each(gpu, cases, lambda case: in_place(gpu, case, build, random))
    return outcome(found, "outputs alias the caches, the new slots alone are written")


def check_formats(options: Options) -> Outcome:
    """Step 4: what is bound is row-major, and no weight is copied to another format."""
    flavour, gpu = flavour_here(options), Gpu()
    cases = layer_cases(full=options.full)
    found = {case: _formats(options, flavour, gpu.sm, case) for case in cases}
    others = sum(each.figures["reformats"] for each in found.values())
    return outcome(found, f"all inputs and outputs are row-major; {others} other reformats")


def check_capture(options: Options) -> Outcome:
    """Step 5: decode steps as CUDA graphs."""
    gpu, build, random = _ready(options)
    read_rate = reading(Gpu(), random)
    cases = [case for case in layer_cases(full=options.full) if case.phase == "decode"]
    found = _each(
        gpu,
        [case for case in cases if case.dtype == "bfloat16"],
        lambda case: capture(gpu, case, build, random, read_rate, samples=options.samples),
    )
    texts = [
        f"{case.name}: {figures['layer_us']:.0f} us for each of {layers} layers, "
        f"{figures['share']:.0%} of reading ({figures['plain_layer_us']:.0f} us plain)"
        for case, each in found.items()
        for layers, figures in each.figures.items()
    ]
    return outcome(found, "; ".join(texts) or f"{LAYERS} layers")


def outcome(found: dict[LayerCase, Found], text: str) -> Outcome:
    """Return what came of all cases; `text` is said if all is well."""
    faults = [fault for each in found.values() for fault in each.faults]
    if not found:
        faults.append("no layer fits the device's memory")
    return Outcome(
        status="fail" if faults else "pass",
        text="; ".join(faults) or f"{len(found)} plans: {text}",
        figures={case.label: each.figures for case, each in found.items()},
    )


def _each(gpu: Gpu, cases: list[LayerCase], check: Check) -> dict[LayerCase, Found]:
    found = {}
    for case in cases:
        needed = sum(size_of(row) for row in graph_of(case).bindings if not row.aliases)
        if needed + SPARE > gpu.memory().free:
            click.echo(f"  {case.label}: needs more device memory than there is")
            continue
        found[case] = check(case)
        gpu.release()
        click.echo(f"  {case.label}: {'; '.join(found[case].faults) or 'right'}")
    return found


def _ready(options: Options) -> tuple[Gpu, Build, np.random.Generator]:
    flavour, gpu = flavour_here(options), Gpu()
    runtime = PlanRuntime(flavour)

    def build(case: LayerCase) -> Engine:
        plan = _plan(options, flavour, gpu.sm, case)
        engine = runtime.engine(plan)
        check_engine(graph_of(case), engine, plan)
        return engine

    return gpu, build, np.random.default_rng(options.seed)


def _plan(options: Options, flavour: Flavour, sm: int, case: LayerCase) -> Path:
    return built_plan(flavour, written_graph(case, Path(options.folder)), sm)


def _formats(options: Options, flavour: Flavour, sm: int, case: LayerCase) -> Found:
    trt: Any = flavour.load()
    plan = _plan(options, flavour, sm, case)
    runtime = trt.Runtime(messages_of(trt).logger)
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    graph, found = graph_of(case), Found()
    for row in graph.bindings:
        laid = engine.get_tensor_format(row.name)
        if laid != trt.TensorFormat.LINEAR:
            found.faults.append(f"{case.label}: {row.name} is {laid}, not row-major")
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    weights = [row.name for row in graph.bindings if row.weight]
    copies, count = reformats(json.loads(text), weights)
    found.faults += [f"{case.label}: {copy} is a copy of a weight" for copy in copies]
    found.figures["reformats"] = count - len(copies)
    return found
