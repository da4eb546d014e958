"""`export-grok index`: check a checkpoint, and write where its bytes lie."""

from pathlib import Path

import click

from export_grok.commands.options import FOLDER, config_option, layers_option
from export_grok.config import GrokConfig

__all__ = ["index"]


@click.command()
@click.argument("checkpoint", type=FOLDER)
@click.option("--out", type=FOLDER, help="Write the index as JSON. [default: only check]")
@layers_option
@config_option
def index(
    checkpoint: Path, out: Path | None, layers: int | None, config: GrokConfig | None
) -> None:
    """Check a CHECKPOINT and find where the bytes of every tensor lie."""
    from export_grok.export.checkpoint import open_weights

    found, weights = open_weights(checkpoint, config, layers)
    if out is not None:
        weights.write(out)
    click.echo(
        f"{len(weights.weights)} tensors of {found.num_layers} layers in {len(weights.files)} "
        f"files, {sum(weights.files.values()):,} bytes: all as they must be"
    )
