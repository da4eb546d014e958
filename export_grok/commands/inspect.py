"""`export-grok inspect`: what a folder is, and what running it needs."""

import json
from pathlib import Path

import click

from export_grok.commands.options import FOLDER, config_option, finite, json_option
from export_grok.config import GrokConfig

__all__ = ["inspect"]


@click.command()
@click.argument("path", type=FOLDER)
@click.option("--tp", type=int, help="Only this tensor-parallel size. [default: all that divide]")
@click.option(
    "--bandwidth",
    type=click.FloatRange(min=0, min_open=True),
    default=3350.0,
    callback=finite,
    show_default=True,
    help="Memory bandwidth of one rank in GB/s, for the speed bound.",
)
@config_option
@json_option
def inspect(
    path: Path, tp: int | None, bandwidth: float, config: GrokConfig | None, as_json: bool
) -> None:
    """Say what PATH is, a checkpoint, graphs or a bundle, and what running it needs."""
    from export_grok.artifacts import open_bundle
    from export_grok.engines.backend import engine_summary
    from export_grok.engines.installation import sentence
    from export_grok.export.summary import summary_of
    from export_grok.plugins.kernels import native_kernels

    summary = summary_of(path, config=config, tensor_parallel=tp)
    kernels = native_kernels() if summary.backend == "ort" else None
    planned = open_bundle(path) if summary.backend not in (None, "ort") else None
    if as_json:
        value = summary.to_dict(bandwidth=bandwidth * 1e9)
        if kernels:
            library = str(kernels.library) if kernels.library else None
            value["kernels"] = {"library": library, "isa": kernels.isa, "reason": kernels.reason}
        if planned:
            value["engine"] = planned.manifest.engine
        click.echo(json.dumps(value))
        return
    from export_grok.export.table import print_summary

    print_summary(summary, bandwidth=bandwidth * 1e9)
    if kernels:
        click.echo(f"kernels here: {sentence(kernels)}")
    if planned:
        click.echo(f"engine: {engine_summary(planned)}")
