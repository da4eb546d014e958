"""Measure how the time of a decode step grows with context, with batch, and with layers.

    python benchmarks/growth.py DIR --report docs/performance.md

DIR takes 11 GB: a random checkpoint of 32 layers, made once, the engines of its first layers, and
what every run of `export-grok bench` printed, `growth.json`. Each run is a process of its own and
measures the read ceiling too, so a step is held to what memory gave in the same minute. Needed is

    pip install -c constraints.txt -e ".[export,onnxruntime,plot]"

It takes some 8 minutes on 2 cores. Measure on a machine that does nothing else: the report says
what makes it doubtful.
"""

import dataclasses
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from growth_report import tables, write_report
from growth_results import Curve, points_of
from peers.mid_model import MID, write_mid_model
from sections import check_report
from stages import built_engine, made_checkpoint, run_stage, told_in_a_line

from export_grok.export.checkpoint import open_weights
from export_grok.files import write_json

CONFIG = dataclasses.replace(MID, num_layers=32, sequence_len=16384)
# What does not grow stays at these.
LAYERS, CONTEXT, BATCH = 8, 256, 1
# Prefill is no part of this, but bench measures one at least.
PROMPT = 16

FILE = click.Path(path_type=Path)


def _numbers(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(number) for number in value.split(",")}))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of whole numbers; write 1,4") from error
    return numbers


@click.command()
@click.argument("folder", metavar="DIR", type=FILE)
@click.option("--context", callback=_numbers, default="256,1024,2048,4096,8192", show_default=True)
@click.option("--batch", callback=_numbers, default="1,2,4,8,16,32", show_default=True)
@click.option("--layers", callback=_numbers, default="4,8,16,32", show_default=True)
@click.option("--rounds", default=7, show_default=True, help="How often each is measured.")
@click.option("--decode-tokens", default=8, show_default=True, help="Steps in a round.")
@click.option("--threads", type=int, help="Of the engine.  [default: as many as cores]")
@click.option("--report", "report_file", type=FILE, help="Markdown file to write a section of.")
def main(
    folder: Path,
    context: tuple[int, ...],
    batch: tuple[int, ...],
    layers: tuple[int, ...],
    rounds: int,
    decode_tokens: int,
    threads: int | None,
    report_file: Path | None,
) -> None:
    """Measure engines of the checkpoint in DIR and print a table for each of the three."""
    # Ended by any signal, it takes along the run of bench, which would go on measuring.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = ["--rounds", str(rounds), "--decode-tokens", str(decode_tokens)]
    options += ["--prompt-tokens", str(PROMPT)]
    if threads is not None:
        options += ["--threads", str(threads)]

    with told_in_a_line():
        if report_file:
            check_report(report_file)
        engines = _engines(folder, sorted({LAYERS, *layers}))
        runs = []

        def bench(number: int, contexts: Sequence[int], batches: Sequence[int]) -> Any:
            given = ["--context", _joined(contexts), "--batch", _joined(batches)]
            click.echo(f"measuring {number} layers, {' '.join(given)}", err=True)
            run = json.loads(run_stage("bench", str(engines[number]), "--json", *given, *options))
            runs.append(run)
            return run

        curves = [
            Curve(
                name="context",
                fixed=f"{LAYERS} layers, batch {BATCH}",
                points=points_of(bench(LAYERS, context, [BATCH]), context),
            ),
            Curve(
                name="batch",
                fixed=f"{LAYERS} layers, context {CONTEXT}",
                points=points_of(bench(LAYERS, [CONTEXT], batch), batch),
            ),
            Curve(
                name="layers",
                fixed=f"batch {BATCH}, context {CONTEXT}",
                points=tuple(
                    point
                    for number in layers
                    for point in points_of(bench(number, [CONTEXT], [BATCH]), [number])
                ),
            ),
        ]
        write_json(folder / "growth.json", {"runs": runs})
        click.echo(tables(curves))
        if report_file:
            write_report(report_file, curves, CONFIG, runs)


def _engines(folder: Path, layers: Sequence[int]) -> dict[int, Path]:
    """Return the engines by their number of layers.

    Raises:
        ClickException: the checkpoint in `folder` is another one.
    """
    checkpoint = made_checkpoint(
        folder, CONFIG, lambda config, out: write_mid_model(out, config), engines=len(layers)
    )
    found, _ = open_weights(checkpoint)
    if found != CONFIG:
        raise click.ClickException(
            f"{checkpoint} is not the checkpoint that this program makes: give another folder"
        )
    return {number: built_engine(checkpoint, number) for number in layers}


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
