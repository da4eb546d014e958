"""Build the ONNX Runtime engine of a folder of graphs: each graph lowered, beside the graph."""

import dataclasses
import logging

import onnx_ir as ir

from export_grok.artifacts import Bundle, graph_file, record_of, write_manifest
from export_grok.config import ENGINE, Dtype, EngineOptions, GrokConfig, HeadDtype
from export_grok.engines.lowering import LoweringReport
from export_grok.engines.ort.lower import lower_graph
from export_grok.errors import ConfigError
from export_grok.export.graphs import write_graph
from export_grok.export.plan import versions
from export_grok.files import output_errors
from export_grok.manifest import Manifest
from export_grok.optional import require
from export_grok.plugins.kernels import native_kernels
from export_grok.progress import progress_bar

logger = logging.getLogger(__name__)

__all__ = ["BACKEND", "DTYPES", "build_engine", "check_options", "summary"]

BACKEND = "ort"
DTYPES: tuple[Dtype, ...] = ("float32",)


def build_engine(graphs: Bundle, options: EngineOptions = ENGINE) -> Bundle:
    """Lower every graph, write it as `*.ort.onnx`, and make the folder a bundle.

    A bundle of the same backend and versions is returned as it is.

    An op that cannot be lowered runs by its function body where there are no native kernels. With
    such here the engine is built, and a warning tells what is slow elsewhere; without, that has to
    be allowed.

    Args:
        graphs: a folder of graphs. It gets the engine, and keeps its graphs.
        options: `allow_functions` builds the engine without native kernels too; the others say
            what is fixed in plans of TensorRT, and here is not.

    Raises:
        BuildError: the dtype has no kernels, or an op was not lowered and must be.
        ConfigError: native kernels are asked for and there are none, or options given that are
            not of this engine.
        MissingDependencyError: ONNX Runtime is not installed.
        OutputError: the folder cannot be written.
    """
    check_options(graphs.config, graphs.manifest.dtype, graphs.manifest.head, options)
    require("onnxruntime", extra="onnxruntime")
    manifest = graphs.manifest
    made_by = manifest.versions | versions("onnxruntime", "onnxruntime-gpu")
    functions = any(count["function"] for count in manifest.lowering.values())
    current = manifest.backend == BACKEND and manifest.versions == made_by
    native = native_kernels().library is not None
    allowed = options.allow_functions or native
    if current and (allowed or not functions):
        return graphs
    single = [(kind, None) for kind in ("embedding", "head", "head_all")]
    layers = [("layer", layer) for layer in range(manifest.config.num_layers)]
    files = dict(manifest.files)
    total = LoweringReport()
    with progress_bar("lowering", len(single) + len(layers), unit="graphs") as advance:
        for kind, layer in [*layers, *single]:
            model = ir.load(graphs.folder / graph_file(kind, layer))
            total.add(lower_graph(model, dtype=manifest.dtype))
            if not allowed:
                total.check()  # before anything is written: all layers are alike, and first
            name = graph_file(kind, layer, variant=BACKEND)
            write_graph(model, graphs.folder / name)
            with output_errors(graphs.folder / name):
                files[name] = record_of(graphs.folder / name)
            advance(1)
    bundle = dataclasses.replace(
        graphs,
        manifest=dataclasses.replace(
            manifest,
            kind="engine",
            backend=BACKEND,
            versions=made_by,
            files=files,
            lowering={
                op: {"lowered": total.lowered[op], "function": total.kept[op]}
                for op in sorted({*total.lowered, *total.kept})
            },
        ),
    )
    write_manifest(bundle.folder, bundle.manifest)
    where = ", where there are no native kernels" if native else ""
    for reason in dict.fromkeys(total.reasons):
        logger.warning("runs by its function body, slowly%s: %s", where, reason)
    return bundle


def check_options(
    config: GrokConfig, dtype: Dtype, head: HeadDtype, options: EngineOptions
) -> None:
    """Refuse options that are not of this engine; see `engines.backend.check_options`.

    Raises:
        ConfigError: some are given.
    """
    others = [name for name in options.given() if name != "allow_functions"]
    if others:
        short = {"tensor_parallel": "--tp"}
        names = ", ".join(short.get(name, f"--{name.replace('_', '-')}") for name in others)
        raise ConfigError(
            f"{names}: the ort engine runs on one CPU, and takes batch and length when it is "
            "opened; leave that away, or choose --backend trt or trt-rtx"
        )


def summary(manifest: Manifest) -> str:
    """Return which ops were lowered, and which run by their function bodies, in a few words."""
    return ", ".join(
        f"{op} {counts['lowered']} lowered"
        + (f" and {counts['function']} by function body" if counts["function"] else "")
        for op, counts in manifest.lowering.items()
    )
