"""`export-grok logits`: what anyone can compare an engine by."""

from pathlib import Path

import click

from export_grok.commands.options import FOLDER, threads_option, tp_option, weights_root_option
from export_grok.commands.preflight import asking, preflight_options

__all__ = ["logits"]


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option(
    "--tokens", type=FOLDER, required=True, help="Token ids, [B, S] whole numbers, .npy."
)
@click.option("--out", type=FOLDER, required=True, help="Where to write `logits` [B, S, V], .npz.")
@click.option(
    "--decode",
    "decode_steps",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Feed so many of the last tokens one at a time.",
)
@threads_option
@tp_option
@weights_root_option
@preflight_options
def logits(
    bundle: Path,
    tokens: Path,
    out: Path,
    decode_steps: int,
    threads: int | None,
    tp: int | None,
    weights_root: Path | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Write the float32 logits of every position of given tokens: how to compare an engine."""
    from export_grok.runtime.logits import write_logits

    shape = write_logits(
        bundle,
        tokens,
        out,
        decode_steps=decode_steps,
        threads=threads,
        tensor_parallel=tp,
        weights_root=weights_root,
        on_needs=asking(force=force, dry_run=dry_run, writes=f"the logits into {out}"),
    )
    click.echo(f"{out}: logits {list(shape)}")
