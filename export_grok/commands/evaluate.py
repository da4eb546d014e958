"""`export-grok evaluate`: perplexity of a bundle on a text."""

import json
from pathlib import Path

import click

from export_grok.commands.options import (
    FOLDER,
    json_option,
    threads_option,
    tp_option,
    weights_root_option,
)
from export_grok.commands.preflight import asking, preflight_options
from export_grok.optional import require
from export_grok.runtime.params import EvaluationOptions

__all__ = ["evaluate"]


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--text", "text_file", type=FOLDER, required=True, help="UTF-8 text to read.")
@click.option(
    "--window",
    type=int,
    default=EvaluationOptions.window,
    show_default=True,
    help="Tokens of a window.",
)
@click.option(
    "--batch",
    type=int,
    default=EvaluationOptions.batch,
    show_default=True,
    help="Windows read together.",
)
@click.option(
    "--lines", is_flag=True, help="Each line is a text of its own, with the end token behind it."
)
@click.option(
    "--reference",
    type=click.Choice(["torch"]),
    help="Let the PyTorch model read the same text, and compare.",
)
@threads_option
@tp_option
@weights_root_option
@json_option
@preflight_options
def evaluate(
    bundle: Path,
    text_file: Path,
    window: int,
    batch: int,
    lines: bool,
    reference: str | None,
    threads: int | None,
    tp: int | None,
    weights_root: Path | None,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Measure how well the engine in BUNDLE reads a text: perplexity, and bits per byte."""
    from export_grok.runtime.evaluate import evaluate_bundle

    if reference:
        require("torch", extra="export")
    result = evaluate_bundle(
        bundle,
        text_file,
        EvaluationOptions(window=window, batch=batch, lines=lines),
        reference=reference is not None,
        threads=threads,
        tensor_parallel=tp,
        weights_root=weights_root,
        on_needs=asking(force=force, dry_run=dry_run),
    )
    readings = {"engine": result.engine, "torch": result.reference}
    made = {name: reading for name, reading in readings.items() if reading is not None}
    if as_json:
        value = {
            name: {
                "perplexity": reading.perplexity,
                "bits_per_byte": reading.bits_per_byte,
                "nats": reading.nats,
            }
            for name, reading in made.items()
        }
        counts = {
            "windows": result.windows,
            "tokens": result.engine.tokens,
            "bytes": result.engine.bytes,
            "difference": result.difference,
        }
        click.echo(json.dumps(value | counts))
        return
    for name, reading in made.items():
        click.echo(
            f"{name:7} perplexity {reading.perplexity:.4f}, "
            f"{reading.bits_per_byte:.4f} bits per byte"
        )
    if result.difference is not None:
        click.echo(f"the engine's perplexity is {result.difference:+.4%} of the reference's")
    click.echo(
        f"{result.windows} windows of {window} tokens: {result.engine.tokens:,} tokens guessed, "
        f"{result.engine.bytes:,} bytes",
        err=True,
    )
