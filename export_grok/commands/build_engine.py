"""`export-grok build-engine`: everything up to an engine."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from export_grok.commands.options import FOLDER, engine_options, graph_options
from export_grok.commands.preflight import asking, preflight_options
from export_grok.config import EngineOptions, ExportOptions, Sums

__all__ = ["build_engine"]


@click.command("build-engine")
@click.argument("source", type=FOLDER)
@click.option("--out", type=FOLDER, help="Folder to write; for graphs, their own folder.")
@click.option(
    "--backend",
    default="ort",
    show_default=True,
    help="Which engine: ort runs on any CPU, trt on NVIDIA GPUs; trt-rtx builds on a CPU for RTX "
    "GPUs.",
)
@click.option(
    "--allow-functions",
    is_flag=True,
    help="Let ops without a kernel run by their slow function bodies.",
)
@engine_options
@graph_options
@preflight_options
def build_engine(
    source: Path,
    out: Path | None,
    backend: str,
    allow_functions: bool,
    sm: tuple[int, ...] | None,
    tp: int,
    batch: int | None,
    chunk: int | None,
    max_length: int | None,
    gpu_memory: float | None,
    sums: Sums,
    weights: str,
    force: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Build an engine from SOURCE: a checkpoint, or a folder of graphs.

    Runs the stages that are missing. A second run of unchanged input returns at once.
    """
    from export_grok.engines.backend import engine_summary
    from export_grok.engines.pipeline import engine_from_source, takes_graphs

    if takes_graphs(source, out):
        _refuse_given("dtype", "head", "layers", "weights", "config", source=source)
    bundle = engine_from_source(
        source,
        out,
        backend=backend,
        engine=EngineOptions(
            allow_functions=allow_functions,
            tensor_parallel=tp,
            sm=sm,
            batch=batch,
            chunk=chunk,
            max_length=max_length,
            gpu_memory=gpu_memory,
            sums=sums,
        ),
        options=ExportOptions(copy_weights=weights == "copy", **options),
        on_needs=asking(
            force=force, dry_run=dry_run, writes=f"the {backend} engine into {out or source}"
        ),
    )
    layers, summary = bundle.config.num_layers, engine_summary(bundle)
    click.echo(f"{bundle.folder}: {backend} engine of {layers} layers ({summary})")


def _refuse_given(*options: str, source: Path) -> None:
    context = click.get_current_context()
    given = [
        f"--{option}"
        for option in options
        if context.get_parameter_source(option) is not ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(
            f"{', '.join(given)} cannot be chosen for graphs that are made, and {source} holds "
            "such: leave the option away, or give the checkpoint."
        )
