"""Build the TensorRT engine of a folder of graphs: static graphs, plans, and a record of both.

Weights are inputs of the plans, so there is one plan of each graph for an architecture, whatever
the number of layers and ranks. A plan's file is named by what it was built from, so a build that
was broken off goes on behind its last plan, and one of unchanged input finds all there.
"""

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from pathlib import Path

from export_grok.artifacts import Bundle, record_of, write_manifest
from export_grok.config import ENGINE, Dtype, EngineOptions, GrokConfig, HeadDtype
from export_grok.engines.trt.graphs import (
    FOLDER,
    StaticGraph,
    kernel_hashes,
    recipe,
    static_graphs,
)
from export_grok.engines.trt.memory import check_memory, memory_of
from export_grok.engines.trt.module import Flavour, flavour_of
from export_grok.engines.trt.plan import plan_from_graph
from export_grok.engines.trt.record import PlanRecord, Sizes, TrtRecord, record_in
from export_grok.export.graphs import write_graph
from export_grok.export.plan import versions
from export_grok.files import output_errors
from export_grok.manifest import Manifest
from export_grok.plugins.tensorrt_plugins import register_plugins

__all__ = [
    "BACKEND",
    "DTYPES",
    "build_engine",
    "build_plans",
    "check_options",
    "check_plans",
    "is_current",
    "summary",
]

logger = logging.getLogger(__name__)

BACKEND = "trt"
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")


def build_engine(graphs: Bundle, options: EngineOptions = ENGINE) -> Bundle:
    """Build the plans of a folder of graphs for the GPU at hand; see `build_plans`."""
    return build_plans(graphs, options, flavour_of(BACKEND))


def check_options(
    config: GrokConfig, dtype: Dtype, head: HeadDtype, options: EngineOptions
) -> None:
    """Hold options to model and machine; see `check_plans`."""
    check_plans(config, dtype, head, options, flavour_of(BACKEND))


def check_plans(
    config: GrokConfig,
    dtype: Dtype,
    head: HeadDtype,
    options: EngineOptions,
    flavour: Flavour,
) -> None:
    """Hold what plans are asked for to model and machine.

    Raises:
        BuildError: there is no GPU and the package needs one.
        ConfigError: ranks do not divide the model, an architecture cannot be built for, or no GPU
            has the memory.
        MissingDependencyError: a package is not installed.
    """
    sms = options.sm or flavour.architectures()
    flavour.check_architectures(sms)
    rank = config.for_rank(options.tensor_parallel)
    sizes = Sizes.of(options, config)
    check_memory(rank, sizes, memory_of(rank, sizes, dtype, head), sms, options.gpu_memory)


def is_current(manifest: Manifest, options: EngineOptions, flavour: Flavour) -> bool:
    """Return whether a folder has the engine that would be built by these options.

    Raises:
        BundleError: the manifest does not say what its plans are.
        And as `check_plans`.
    """
    made = (manifest.backend, manifest.versions)
    if made != (flavour.backend, _made_by(manifest, flavour)):
        return False
    found = record_in(manifest)
    architectures = {plan.sm for plan in found.plans}
    return (found.recipe, found.sizes, found.sums, architectures) == (
        recipe(),
        Sizes.of(options, manifest.config),
        options.sums,
        set(options.sm or flavour.architectures()),
    )


def build_plans(graphs: Bundle, options: EngineOptions, flavour: Flavour) -> Bundle:
    """Build plans of all graph kinds for all architectures, and make the folder a bundle.

    A bundle of the same backend, options, versions and program is returned as it is.

    Args:
        graphs: a folder of graphs. It gets the plans in a folder `trt`, and keeps its graphs.
        options: sizes, ranks and architectures.
        flavour: which package builds.

    Raises:
        BuildError: TensorRT refuses a graph.
        OutputError: the folder cannot be written.
        And as `check_plans`.
    """
    old, out = graphs.manifest, graphs.folder
    check_plans(old.config, old.dtype, old.head, options, flavour)
    if is_current(old, options, flavour):
        return graphs
    sizes = Sizes.of(options, old.config)
    sms = options.sm or flavour.architectures()
    static = static_graphs(graphs, sizes, options.sums)
    plugged = not flavour.any_gpu  # a package that builds for any GPU has no plugins
    kernels = kernel_hashes(static, sms[0]) if plugged else {}
    plans = _planned(static, sms, flavour, kernels)
    graphs_only = _without_engine(old)
    with output_errors(out / FOLDER):
        (out / FOLDER).mkdir(exist_ok=True)
    if old.backend is not None:
        write_manifest(out, graphs_only)  # till the last plan is there, these are graphs
    for graph in static:
        write_graph(graph.model, out / graph.record.file)
    if plugged:
        register_plugins(sms[0])
    for plan, graph in plans.items():
        if not (out / plan.file).exists():
            logger.info("building %s for SM%d", graph.record.file, plan.sm)
            source = out / graph.record.file
            plan_from_graph(source, out / plan.file, flavour=flavour, sm=plan.sm)
    record = TrtRecord(
        module=flavour.package,
        version=flavour.version(),
        sizes=sizes,
        graphs=tuple(graph.record for graph in static),
        plans=tuple(plans),
        kernels=kernels,
        recipe=recipe(),
        sums=options.sums,
    )
    nodes: Counter[str] = sum((Counter(graph.record.nodes) for graph in static), Counter())
    with output_errors(out):
        manifest = dataclasses.replace(
            graphs_only,
            kind="engine",
            backend=flavour.backend,
            versions=_made_by(old, flavour),
            files=graphs_only.files | {name: record_of(out / name) for name in record.files},
            lowering={
                op_type: {"lowered": count if plugged else 0, "function": 0 if plugged else count}
                for op_type, count in sorted(nodes.items())
            },
            engine=record.to_dict(),
        )
        write_manifest(out, manifest)
        _remove_others(out / FOLDER, {Path(name).name for name in record.files})
    return dataclasses.replace(graphs, manifest=manifest)


def summary(manifest: Manifest) -> str:
    """Return of how many graphs there are plans, and for what, in a few words."""
    record = record_in(manifest)
    sizes = record.sizes
    architectures = ", ".join(f"SM{sm}" for sm in sorted({plan.sm for plan in record.plans}))
    ranks = f"{sizes.tensor_parallel} ranks, " if sizes.tensor_parallel > 1 else ""
    if record.sums == "between":
        ranks = f"{sizes.tensor_parallel} ranks summed between plans, "
    return (
        f"{len(record.plans)} plans of {len(record.graphs)} graphs for {architectures}: {ranks}"
        f"{sizes.batch} rows of {sizes.max_length} tokens, chunks of {sizes.chunk}"
    )


def _made_by(manifest: Manifest, flavour: Flavour) -> dict[str, str]:
    made_by = manifest.versions | versions(flavour.package.replace("_", "-"))
    return made_by if flavour.any_gpu else made_by | versions("triton")


def _planned(
    static: tuple[StaticGraph, ...],
    sms: tuple[int, ...],
    flavour: Flavour,
    kernels: dict[str, str],
) -> dict[PlanRecord, StaticGraph]:
    """Return the plans to be; the name of one holds the hash of all it is built from."""
    plans = {}
    for graph in static:
        record = graph.record
        used = {op_type: kernels.get(op_type) for op_type in record.nodes}
        for sm in sms:
            origin = json.dumps([flavour.package, flavour.version(), sm, used]).encode()
            name = hashlib.sha256(graph.content + origin).hexdigest()[:12]
            file = f"{record.file.removesuffix('.onnx')}.sm{sm}.{name}.plan"
            plan = PlanRecord(
                kind=record.kind, phase=record.phase, sm=sm, file=file, part=record.part
            )
            plans[plan] = graph
    return plans


def _without_engine(manifest: Manifest) -> Manifest:
    """Return the manifest of the same folder as graphs."""
    files = {
        name: found for name, found in manifest.files.items() if not name.startswith(f"{FOLDER}/")
    }
    return dataclasses.replace(
        manifest, kind="graphs", backend=None, files=files, lowering={}, engine={}
    )


def _remove_others(folder: Path, names: set[str]) -> None:
    """Take away graphs and plans of an earlier engine."""
    for path in folder.iterdir():
        if path.name not in names and path.suffix in (".onnx", ".plan"):
            path.unlink()
