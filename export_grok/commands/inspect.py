"""`export-grok inspect`: what a folder is, and what running it needs."""

import json
from pathlib import Path

import click

from export_grok.commands.options import FOLDER, config_option, finite, json_option
from export_grok.config import GrokConfig
from export_grok.export.data_sheets import DATA_SHEETS

__all__ = ["inspect"]


def _finite_or_none(
    context: click.Context, option: click.Parameter, value: float | None
) -> float | None:
    return None if value is None else finite(context, option, value)


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
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    type=click.Choice(list(DATA_SHEETS)),
    help="Say how fast ranks with this GPU are on paper; may be repeated.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=1, show_default=True, help="For --gpu: rows."
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="For --gpu: tokens of each row in the cache.",
)
@click.option(
    "--share",
    type=click.FloatRange(min=0, max=1, min_open=True),
    callback=finite,
    default=0.8,
    show_default=True,
    help="For --gpu: part of its bandwidth that reading reaches.",
)
@click.option(
    "--latency",
    type=click.FloatRange(min=0),
    callback=_finite_or_none,
    help="For --gpu: microseconds that an all-reduce takes to start. [default: that of its link]",
)
@config_option
@json_option
def inspect(
    path: Path,
    tp: int | None,
    bandwidth: float,
    gpus: tuple[str, ...],
    batch: int,
    context: int,
    share: float,
    latency: float | None,
    config: GrokConfig | None,
    as_json: bool,
) -> None:
    """Say what PATH is, a checkpoint, graphs or a bundle, and what running it needs.

    Bytes are counted. What --gpu says of time is a model: docs/scaling.md tells what is in it.
    """
    from export_grok.artifacts import open_bundle
    from export_grok.engines.backend import engine_summary
    from export_grok.engines.installation import sentence
    from export_grok.export.summary import summary_of
    from export_grok.export.time_model import Workload
    from export_grok.plugins.kernels import native_kernels

    summary = summary_of(path, config=config, tensor_parallel=tp)
    estimates = [
        summary.estimates(
            gpu,
            Workload(batch=batch, context=context),
            bandwidth_share=share,
            latency=None if latency is None else latency / 1e6,
        )
        for gpu in dict.fromkeys(gpus)
    ]
    kernels = native_kernels() if summary.backend == "ort" else None
    planned = open_bundle(path) if summary.backend not in (None, "ort") else None
    if as_json:
        value = summary.to_dict(bandwidth=bandwidth * 1e9)
        if estimates:
            value["gpus"] = [found.to_dict() for found in estimates]
        if kernels:
            library = str(kernels.library) if kernels.library else None
            value["kernels"] = {"library": library, "isa": kernels.isa, "reason": kernels.reason}
        if planned:
            value["engine"] = planned.manifest.engine
        click.echo(json.dumps(value))
        return
    from export_grok.export.table import print_summary

    print_summary(summary, bandwidth=bandwidth * 1e9, estimates=estimates)
    if kernels:
        click.echo(f"kernels here: {sentence(kernels)}")
    if planned:
        click.echo(f"engine: {engine_summary(planned)}")
