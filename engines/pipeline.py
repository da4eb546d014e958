"""All stages up to an engine: those that are missing run, the others are taken as they are."""

import dataclasses
from pathlib import Path

from export_grok.artifacts import MANIFEST, Bundle, open_bundle, read_bundle
from export_grok.config import ENGINE, EXPORT, EngineOptions, ExportOptions
from export_grok.engines.backend import backend_dtype, build_needs, builder, check_options
from export_grok.engines.demand import Graphs
from export_grok.errors import ConfigError
from export_grok.export.checkpoint import holds_weights, open_weights
from export_grok.needs import Needs, OnNeeds
from export_grok.optional import require

__all__ = ["engine_from_source", "takes_graphs"]


def takes_graphs(source: Path, out: Path | None) -> bool:
    """Return whether `source` is taken as a folder of graphs, not as a checkpoint.

    A checkpoint whose graphs were written into its own folder is both: with `out` it is taken as
    the checkpoint, without as the graphs.
    """
    return (source / MANIFEST).exists() and (out is None or not holds_weights(source))


def engine_from_source(
    source: Path,
    out: Path | None,
    *,
    backend: str,
    engine: EngineOptions = ENGINE,
    options: ExportOptions = EXPORT,
    on_needs: OnNeeds = lambda needs: None,
) -> Bundle:
    """Return a bundle with the engine of a checkpoint, or of a folder of graphs.

    Args:
        source: folder of a checkpoint, a store, or graphs.
        out: folder of the bundle. Graphs get their engine in their own folder.
        backend: which engine.
        engine: how the engine is built.
        options: how the graphs of a checkpoint are made.
        on_needs: gets what all stages need that run, before anything is written.

    Raises:
        BuildError: the backend cannot run the graphs.
        BundleError: `out` holds something else.
        CheckpointError: the checkpoint is damaged.
        ConfigError: there is no such backend, it does not compute in the dtype, or `out` and
            `source` do not go together.
        OutputError: `out` cannot be written.
    """
    build = builder(backend)
    if takes_graphs(source, out):
        if out is not None and out.resolve() != source.resolve():
            raise ConfigError(
                f"{source} holds graphs: their engine is built beside them; leave --out away, "
                "or give the checkpoint"
            )
        bundle = open_bundle(source)
        check_options(backend, bundle.config, bundle.manifest.dtype, bundle.manifest.head, engine)
        on_needs(build_needs(backend, Graphs.of_bundle(bundle), engine))
        return build(bundle, engine)
    if out is None:
        raise ConfigError(f"say where the bundle of {source} goes: --out DIR")
    # Before minutes of work, and before anything is written.
    dtype = backend_dtype(backend, options.dtype)
    config, index = open_weights(source, options.config, options.layers)
    check_options(backend, config, dtype, options.head, engine)
    options = dataclasses.replace(options, dtype=dtype)
    require("torch", extra="export")
    from export_grok.export.graph_folder import export_graphs

    def of_all(needs: Needs) -> None:
        if needs.nothing:  # the graphs are there
            graphs = Graphs.of_bundle(read_bundle(out))
        else:
            graphs = Graphs(folder=out, config=config, dtype=dtype, head=options.head, index=index)
        on_needs(needs + build_needs(backend, graphs, engine))

    return build(export_graphs(source, out, options, on_needs=of_all), engine)
