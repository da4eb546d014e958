"""`export-grok export`: weights to graphs."""

from pathlib import Path
from typing import Any

import click

from export_grok.commands.options import FOLDER, graph_options
from export_grok.commands.preflight import asking, preflight_options
from export_grok.config import ExportOptions
from export_grok.optional import require

__all__ = ["export"]


@click.command()
@click.argument("checkpoint", type=FOLDER)
@click.option("--out", type=FOLDER, required=True, help="Folder to write.")
@graph_options
@preflight_options
def export(
    checkpoint: Path, out: Path, weights: str, force: bool, dry_run: bool, **options: Any
) -> None:
    """Write the ONNX graphs of a CHECKPOINT: one a layer, embedding and head."""
    require("torch", extra="export")
    from export_grok.export.graph_folder import export_graphs

    copied = weights == "copy"
    what = "graphs, and a copy of the weights," if copied else "graphs"
    bundle = export_graphs(
        checkpoint,
        out,
        ExportOptions(copy_weights=copied, **options),
        on_needs=asking(force=force, dry_run=dry_run, writes=f"{what} into {out}"),
    )
    manifest = bundle.manifest
    head = ", head in int8" if manifest.head == "int8" else ""
    click.echo(
        f"{bundle.folder}: graphs of {manifest.config.num_layers} layers in {manifest.dtype}{head}"
    )
