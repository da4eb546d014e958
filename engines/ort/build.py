"""Build the ONNX Runtime engine of a folder of graphs: each graph lowered, beside the graph.

For ranks the graphs are traced anew, each with a rank's share of the model, and cut where ranks
are summed. Every part is lowered too, and the weights of each rank are packed. A build that was
broken off leaves graphs without an engine, and goes on behind the last file of weights.
"""

import dataclasses
import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from export_grok.artifacts import RANK_GRAPHS, Bundle, graph_file, record_of, write_manifest
from export_grok.config import ENGINE, Dtype, EngineOptions, GrokConfig, HeadDtype
from export_grok.engines.lowering import LoweringReport
from export_grok.engines.ort.lower import lower_graph
from export_grok.engines.ort.parts import rank_parts
from export_grok.errors import BundleError, ConfigError
from export_grok.export.contract import GRAPH_KINDS, GraphKind
from export_grok.export.graphs import check_stamped, graph_errors, read_graph, write_graph
from export_grok.export.head import head_index
from export_grok.export.plan import versions
from export_grok.export.rank_weights import rank_index, write_ranks
from export_grok.files import output_errors, read_json, write_json
from export_grok.manifest import FileRecord, Manifest
from export_grok.optional import require
from export_grok.plugins.kernels import native_kernels
from export_grok.progress import progress_bar
from export_grok.weights import WeightIndex

logger = logging.getLogger(__name__)

__all__ = ["BACKEND", "DTYPES", "build_engine", "check_options", "is_current", "summary"]

BACKEND = "ort"
DTYPES: tuple[Dtype, ...] = ("float32",)

# Stands in a folder from the first rank's file to the manifest that names them all.
RANK_PLAN = ".ranks.json"


def build_engine(graphs: Bundle, options: EngineOptions = ENGINE) -> Bundle:
    """Lower every graph, write it as `*.ort.onnx`, and make the folder a bundle.

    A bundle of the same backend, ranks and versions is returned as it is.

    An op that cannot be lowered runs by its function body where there are no native kernels. With
    such here the engine is built, and a warning tells what is slow elsewhere; without, that has to
    be allowed.

    Args:
        graphs: a folder of graphs. It gets the engine, and keeps its graphs.
        options: `allow_functions` builds the engine without native kernels too; with
            `tensor_parallel` it is one of ranks, with a copy of the weights; the others say what
            is fixed in plans of TensorRT, and here is not.

    Raises:
        BuildError: the dtype has no kernels, or an op was not lowered and must be.
        CheckpointError: weights that ranks are to share cannot be read.
        ConfigError: native kernels are asked for and there are none, options are given that are
            not of this engine, or so many ranks cannot share the model.
        MissingDependencyError: ONNX Runtime is not installed, or torch for ranks.
        OutputError: the folder cannot be written.
    """
    check_options(graphs.config, graphs.manifest.dtype, graphs.manifest.head, options)
    require("onnxruntime", extra="onnxruntime")
    if is_current(graphs.manifest, options):
        _finish(graphs.folder)  # a run that was killed behind its manifest has left its plan
        return graphs
    manifest, ranks = graphs.manifest, options.tensor_parallel
    native = native_kernels().library is not None
    allowed = options.allow_functions or native
    total = LoweringReport()
    lowered = _lowered(graphs, ranks, total, allowed=allowed)
    first = next(lowered)  # before anything is written: all layers are alike, and first
    resume = _begin(graphs, ranks)
    files = _without_engine(manifest).files
    for models in itertools.chain([first], lowered):
        for name, model in models.items():
            with graph_errors(graphs.folder / name):
                write_graph(model, graphs.folder / name)
            with output_errors(graphs.folder / name):
                files[name] = record_of(graphs.folder / name)
    if ranks > 1:
        files |= _pack(graphs, ranks, resume=resume)
    bundle = dataclasses.replace(
        graphs,
        manifest=dataclasses.replace(
            manifest,
            kind="engine",
            backend=BACKEND,
            versions=_made_by(manifest),
            files=files,
            lowering={
                op: {"lowered": total.lowered[op], "function": total.kept[op]}
                for op in sorted({*total.lowered, *total.kept})
            },
            engine=_engine_of(ranks),
        ),
    )
    write_manifest(bundle.folder, bundle.manifest)
    _finish(bundle.folder)
    where = ", where there are no native kernels" if native else ""
    for reason in dict.fromkeys(total.reasons):
        logger.warning("runs by its function body, slowly%s: %s", where, reason)
    return bundle


def is_current(manifest: Manifest, options: EngineOptions) -> bool:
    """Return whether a folder has the engine that would be built by these options.

    Raises:
        ConfigError: native kernels are asked for and there are none.
    """
    functions = any(count["function"] for count in manifest.lowering.values())
    allowed = options.allow_functions or native_kernels().library is not None
    made = (manifest.backend, manifest.versions, manifest.engine)
    wanted = (BACKEND, _made_by(manifest), _engine_of(options.tensor_parallel))
    return made == wanted and (allowed or not functions)


def check_options(
    config: GrokConfig, dtype: Dtype, head: HeadDtype, options: EngineOptions
) -> None:
    """Refuse options that are not of this engine; see `engines.backend.check_options`.

    Raises:
        ConfigError: some are given, or so many ranks cannot share the model evenly.
    """
    others = [
        name for name in options.given() if name not in ("allow_functions", "tensor_parallel")
    ]
    if others:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ConfigError(
            f"{names}: the ort engine runs on one CPU, and takes batch and length when it is "
            "opened; leave that away, or choose --backend trt or trt-rtx"
        )
    config.for_rank(options.tensor_parallel)


def summary(manifest: Manifest) -> str:
    """Return which ops were lowered, and which run by their function bodies, in a few words."""
    ranks = manifest.engine.get("tensor_parallel", 1)
    ops = [
        f"{op} {counts['lowered']} lowered"
        + (f" and {counts['function']} by function body" if counts["function"] else "")
        for op, counts in manifest.lowering.items()
    ]
    return ", ".join([f"{ranks} ranks", *ops] if ranks > 1 else ops)


def _made_by(manifest: Manifest) -> dict[str, str]:
    return manifest.versions | versions("onnxruntime", "onnxruntime-gpu")


def _engine_of(ranks: int) -> dict[str, Any]:
    return {"tensor_parallel": ranks} if ranks > 1 else {}


def _lowered(
    graphs: Bundle, ranks: int, total: LoweringReport, *, allowed: bool
) -> Iterator[dict[str, ir.Model]]:
    """Yield the graphs to write, by name, and count what was lowered into `total`."""
    manifest = graphs.manifest
    count = manifest.config.num_layers + 3
    source = _whole(graphs) if ranks == 1 else _parts(graphs, ranks)
    with progress_bar("lowering", count, unit="graphs") as advance:
        for models in source:
            for name, model in list(models.items()):
                with graph_errors(graphs.folder / name):
                    own = model.clone()
                    total.add(lower_graph(own, dtype=manifest.dtype))
                models[f"{name.removesuffix('.onnx')}.{BACKEND}.onnx"] = own
                if ranks == 1:
                    del models[name]  # it is in the folder
            if not allowed:
                total.check()
            yield models
            advance(1)


def _whole(graphs: Bundle) -> Iterator[dict[str, ir.Model]]:
    index, head = _weights(graphs)
    wanted: list[tuple[GraphKind, int | None]] = [
        *(("layer", layer) for layer in range(graphs.config.num_layers)),
        *((kind, None) for kind in GRAPH_KINDS if kind != "layer"),
    ]
    for kind, layer in wanted:
        path = graphs.folder / graph_file(kind, layer)
        with graph_errors(path):
            model = read_graph(path)
            own = head if kind in ("head", "head_all") else index
            check_stamped(model, path, kind, own, layer)
        yield {path.name: model}


def _parts(graphs: Bundle, ranks: int) -> Iterator[dict[str, ir.Model]]:
    index = rank_index(graphs.config, *_weights(graphs), graphs.folder, ranks)
    return rank_parts(graphs, index, ranks)


def _weights(graphs: Bundle) -> tuple[WeightIndex, WeightIndex]:
    """Return where the weights of the model lie, and those of its heads."""
    index = graphs.index()
    own = graphs.manifest.head == "int8"
    return index, head_index(graphs.config, graphs.folder) if own else index


def _pack(graphs: Bundle, ranks: int, *, resume: bool) -> dict[str, FileRecord]:
    index, head = _weights(graphs)
    out = graphs.folder
    length = ranks * sum(rank_index(graphs.config, index, head, out, ranks).files.values())
    with progress_bar("packing the ranks' weights", length, unit="bytes") as advance:
        names = write_ranks(
            graphs.config, index, head, out, ranks, resume=resume, progress=advance
        )
    with output_errors(out):
        return {name: record_of(out / name) for name in names}


def _begin(graphs: Bundle, ranks: int) -> bool:
    """Have the folder hold graphs without an engine until the new one is whole.

    Returns:
        Whether it has weights of just these ranks.
    """
    manifest, out = graphs.manifest, graphs.folder
    plan: dict[str, Any] = {
        "tensor_parallel": ranks,
        "config": manifest.config.to_dict(),
        "head": manifest.head,
        "source": manifest.source,
    }
    resume = ranks > 1 and (_plan_in(out) == plan or manifest.engine == _engine_of(ranks))
    with output_errors(out):
        if resume:
            write_json(out / RANK_PLAN, plan)  # before the manifest no longer tells
        if manifest.backend is not None:
            write_manifest(out, _without_engine(manifest))
        if not resume:
            (out / RANK_PLAN).unlink(missing_ok=True)
            for folder in [out / RANK_GRAPHS, *out.glob("rank_[0-9]*")]:
                shutil.rmtree(folder, ignore_errors=True)
        for path in out.glob(f"*.{BACKEND}.onnx"):
            path.unlink()
        if ranks > 1:
            write_json(out / RANK_PLAN, plan)
            (out / RANK_GRAPHS).mkdir(exist_ok=True)
    return resume


def _finish(out: Path) -> None:
    with output_errors(out):
        (out / RANK_PLAN).unlink(missing_ok=True)


def _plan_in(out: Path) -> dict[str, Any] | None:
    try:
        return read_json(out / RANK_PLAN)
    except BundleError:
        return None


def _without_engine(manifest: Manifest) -> Manifest:
    """Return the manifest of the same folder as graphs."""
    files = {
        name: record
        for name, record in manifest.files.items()
        if not name.endswith(f".{BACKEND}.onnx")
        and not name.startswith((f"{RANK_GRAPHS}/", "rank_"))
    }
    return dataclasses.replace(
        manifest, kind="graphs", backend=None, files=files, lowering={}, engine={}
    )
