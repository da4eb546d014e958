"""`export-grok demo-checkpoint`: a small model in the released format."""

from pathlib import Path

import click

from export_grok.commands.options import FOLDER

__all__ = ["demo_checkpoint"]


@click.command("demo-checkpoint")
@click.argument("out", type=FOLDER)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def demo_checkpoint(out: Path, seed: int) -> None:
    """Write a small random Grok-1 in the released format, with a tokenizer, into OUT."""
    from export_grok.export.demo import write_demo_checkpoint

    write_demo_checkpoint(out, seed=seed)
    click.echo(f"{out}: a random Grok-1 of {sum(1 for _ in (out / 'ckpt-0').iterdir())} files")
