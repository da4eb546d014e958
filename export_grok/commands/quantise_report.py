"""`export-grok quantise-report`: what int8 has done to each matrix."""

import json
from pathlib import Path

import click

from export_grok.commands.options import (
    FOLDER,
    config_option,
    json_option,
    layers_option,
    plot_option,
)
from export_grok.commands.preflight import asking, preflight_options
from export_grok.config import GrokConfig

__all__ = ["quantise_report"]


@click.command("quantise-report")
@click.argument("checkpoint", type=FOLDER)
@click.option(
    "--reference",
    type=FOLDER,
    help="The weights in float: a safetensors file, or a folder of such. Shows the error.",
)
@plot_option
@layers_option
@config_option
@json_option
@preflight_options
def quantise_report(
    checkpoint: Path,
    reference: Path | None,
    plot: Path | None,
    layers: int | None,
    config: GrokConfig | None,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """List the int8 matrices of a CHECKPOINT, the worst first: scales, saturation, error."""
    from export_grok.export.quantisation import quantisation_of
    from export_grok.export.quantisation_report import draw_report, print_report

    tensors = quantisation_of(
        checkpoint,
        reference,
        config=config,
        layers=layers,
        on_needs=asking(
            force=force,
            dry_run=dry_run,
            writes="nothing" if plot is None else f"a picture into {plot}",
        ),
    )
    if plot is not None:
        draw_report(tensors, plot)
    if as_json:
        click.echo(json.dumps([tensor.to_dict() for tensor in tensors]))
    else:
        print_report(tensors)
