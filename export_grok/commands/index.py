"""`export-grok index`: check a checkpoint, and write where its bytes lie."""

from pathlib import Path

import click

from export_grok.commands.options import FOLDER, config_option, layers_option
from export_grok.commands.preflight import preflight, preflight_options
from export_grok.config import GrokConfig
from export_grok.needs import Disk, Needs

__all__ = ["index"]

# A tensor's line in the file.
ENTRY_BYTES = 250


@click.command()
@click.argument("checkpoint", type=FOLDER)
@click.option("--out", type=FOLDER, help="Write the index as JSON. [default: only check]")
@layers_option
@config_option
@preflight_options
def index(
    checkpoint: Path,
    out: Path | None,
    layers: int | None,
    config: GrokConfig | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Check a CHECKPOINT and find where the bytes of every tensor lie."""
    from export_grok.export.checkpoint import open_weights

    found, weights = open_weights(checkpoint, config, layers)
    if out is not None:
        entries = Disk(folder=out.parent, nbytes=ENTRY_BYTES * len(weights.weights))
        needs = Needs(disk=(entries,))
        if preflight(needs, force=force, dry_run=dry_run, writes=f"the index into {out}"):
            weights.write(out)
    click.echo(
        f"{len(weights.weights)} tensors of {found.num_layers} layers in {len(weights.files)} "
        f"files, {sum(weights.files.values()):,} bytes: all as they must be"
    )
