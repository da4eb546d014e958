"""`export-grok export-weights`: the weights as files that other programs load."""

import json
from pathlib import Path
from typing import Any

import click

from export_grok.commands.options import FOLDER, config_option, json_option, layers_option
from export_grok.commands.preflight import preflight, preflight_options
from export_grok.config import HEAD_DTYPES, GrokConfig
from export_grok.export.weights_to.options import (
    FORMATS,
    NAMINGS,
    WEIGHT_DTYPES,
    WeightsOptions,
)

__all__ = ["export_weights"]


@click.command("export-weights")
@click.argument("source", type=FOLDER)
@click.option(
    "--to",
    type=click.Choice(FORMATS),
    required=True,
    help="hf: safetensors with a config.json; gguf: for llama.cpp.",
)
@click.option("--out", type=FOLDER, required=True, help="Folder to write.")
@click.option(
    "--names",
    type=click.Choice(NAMINGS),
    help="hf: whose names the tensors get. [default: hpcai, which vLLM knows too]",
)
@click.option(
    "--dtype",
    type=click.Choice(WEIGHT_DTYPES),
    help="Of the matrices. [default: hf bfloat16; gguf int8, the codes as they are]",
)
@click.option(
    "--head",
    type=click.Choice(HEAD_DTYPES),
    default=WeightsOptions.head,
    show_default=True,
    help="gguf: the embedding, which is the head too.",
)
@click.option(
    "--split/--no-split",
    default=None,
    help="gguf: a file for each layer. [default: if one file would be longer than 50 GB]",
)
@layers_option
@config_option
@click.option("--overwrite", is_flag=True, help="Replace what --out holds of another export.")
@json_option
@preflight_options
def export_weights(
    source: Path,
    out: Path,
    layers: int | None,
    config: GrokConfig | None,
    overwrite: bool,
    as_json: bool,
    force: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Write the weights of SOURCE, a checkpoint, a store or a bundle, for other programs.

    Broken off, the same command goes on behind the last whole file.
    """
    from export_grok.export.weights_to.export import plan_export

    plan = plan_export(
        source,
        out,
        WeightsOptions(**options),
        config=config,
        layers=layers,
        overwrite=overwrite,
    )
    begin = preflight(plan.needs, force=force, dry_run=dry_run)
    for note in plan.notes:
        click.echo(f"Note: {note}", err=True)
    if not begin:
        return
    plan.folder.write()
    if as_json:
        click.echo(json.dumps(plan.to_dict()))
        return
    files, kept = len(plan.folder.files), len(plan.folder.kept)
    there = f", {kept} of them there before" if kept else ""
    click.echo(f"{out}: {files} files{there}, {plan.folder.nbytes:,} bytes")
