"""Measure what many requests at once bring, and how long they keep each other waiting.

    python benchmarks/batching.py DIR --report docs/serving.md [--rounds 7] [--json FILE]

DIR takes 9 GB: the demo model, a random layer of Grok-1 in full size, and their engines, made
once. Three things are measured, each with its settings by turns, round by round:

- the demo model answers the same number of requests with 1, 2, 4 and 8 rows;
- a decode step of the layer with as many rows, beside the bytes of the experts that were chosen;
- with chunks of 32 to 256 tokens, how long a prompt waits for its first token while others get
  their answers, how long those wait for their next token, and how long a short prompt waits that
  comes while a long one is brought.

It takes a quarter of an hour on 2 cores. Measure on a machine that does nothing else.
"""

import dataclasses
from pathlib import Path

import click
from batching_report import tables, write_report
from batching_rows import throughput
from batching_steps import step_growth
from batching_waits import waits
from others import Others
from sections import check_report
from stages import built_engine, made_checkpoint, run_stage, told_in_a_line

from export_grok.config import GROK_1
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.files import write_json

ROWS = (1, 2, 4, 8)
CHUNKS = (32, 64, 128, 256)
FILE = click.Path(path_type=Path)


@click.command()
@click.argument("folder", metavar="DIR", type=FILE)
@click.option("--rounds", default=7, show_default=True, help="How often each is measured.")
@click.option("--json", "json_file", type=FILE, help="File for every sample.")
@click.option("--report", "report_file", type=FILE, help="Markdown file to write a section of.")
def main(folder: Path, rounds: int, json_file: Path | None, report_file: Path | None) -> None:
    """Measure the demo model and a layer of full size in DIR."""
    with told_in_a_line():
        if report_file:
            check_report(report_file)
        demo, layer = _demo(folder / "demo"), _layer(folder / "layer")
        with Others() as others:
            click.echo("measuring requests", err=True)
            rates = throughput(demo, ROWS, rounds)
            click.echo("measuring steps", err=True)
            steps = step_growth(layer, ROWS, rounds)
            click.echo("measuring waits", err=True)
            found = waits(layer, CHUNKS, rounds)
        parts = {"requests": rates, "steps": steps, "waits": found}
        if json_file:
            told = {
                name: [dataclasses.asdict(each) for each in part] for name, part in parts.items()
            }
            write_json(json_file, {**told, "others": others.cores})
        click.echo(tables(rates, steps, found, others.cores))
        if report_file:
            write_report(report_file, rates, steps, found, others.cores)


def _demo(folder: Path) -> Path:
    """Return the engine of the demo model."""
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    if not checkpoint.exists():
        folder.mkdir(parents=True, exist_ok=True)
        run_stage("demo-checkpoint", str(checkpoint))
    run_stage("build-engine", str(checkpoint), "--out", str(engine))
    return engine


def _layer(folder: Path) -> Path:
    """Return the engine of a random layer in full size."""
    config = dataclasses.replace(GROK_1, num_layers=1)
    return built_engine(made_checkpoint(folder, config, write_random_checkpoint), 1)


if __name__ == "__main__":
    main()
