"""`export-grok demo-checkpoint`: a small model in the released format."""

from pathlib import Path

import click

from export_grok.commands.options import FOLDER
from export_grok.commands.preflight import asking, preflight_options

__all__ = ["demo_checkpoint"]


@click.command("demo-checkpoint")
@click.argument("out", type=FOLDER)
@preflight_options
def demo_checkpoint(out: Path, force: bool, dry_run: bool) -> None:
    """Write a small trained Grok-1 in the released format, with a tokenizer, into OUT."""
    from export_grok.export.demo import write_demo_checkpoint

    config = write_demo_checkpoint(
        out, on_needs=asking(force=force, dry_run=dry_run, writes=f"a checkpoint into {out}")
    )
    click.echo(f"{out}: a trained Grok-1 of {config.num_layers} layers, width {config.emb_size}")
