"""`export-grok demo-checkpoint`: a small model in the released format."""

from pathlib import Path

import click

from export_grok.commands.options import FOLDER

__all__ = ["demo_checkpoint"]


@click.command("demo-checkpoint")
@click.argument("out", type=FOLDER)
def demo_checkpoint(out: Path) -> None:
    """Write a small trained Grok-1 in the released format, with a tokenizer, into OUT."""
    from export_grok.export.demo import write_demo_checkpoint

    config = write_demo_checkpoint(out)
    click.echo(f"{out}: a trained Grok-1 of {config.num_layers} layers, width {config.emb_size}")
