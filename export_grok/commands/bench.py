"""`export-grok bench`: how fast an engine is here, and how near to what memory allows."""

import json
import os
import sys
from pathlib import Path

import click

from export_grok.commands.options import (
    FOLDER,
    json_option,
    plot_option,
    threads_option,
    tp_option,
    weights_root_option,
)
from export_grok.commands.preflight import asking, preflight_options
from export_grok.errors import OutputError
from export_grok.optional import require
from export_grok.runtime.bench.options import CONTEXTS, PROMPTS, BenchOptions

__all__ = ["bench"]


def _numbers(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(number) for number in value.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} is no list of whole numbers; write it as 1,4."
        ) from error


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option(
    "--prompt-tokens",
    callback=_numbers,
    metavar="N,...",
    help="Lengths of the prompts whose prefill is measured. "
    f"[default: {_joined(PROMPTS)}, or what the model takes]",
)
@click.option(
    "--context",
    callback=_numbers,
    metavar="N,...",
    help="Tokens in the cache when decoding begins. "
    f"[default: {_joined(CONTEXTS)}, or what the model takes]",
)
@click.option(
    "--batch",
    callback=_numbers,
    metavar="N,...",
    default=_joined(BenchOptions.batch),
    show_default=True,
    help="Rows that decode together. The first batch does the prefill.",
)
@click.option(
    "--rounds",
    type=int,
    default=BenchOptions.rounds,
    show_default=True,
    help="How often each setting is measured.",
)
@click.option(
    "--decode-tokens",
    type=int,
    default=BenchOptions.decode_tokens,
    show_default=True,
    help="Steps of decoding in a round.",
)
@click.option(
    "--seed",
    type=int,
    default=BenchOptions.seed,
    show_default=True,
    help="Which random tokens are read.",
)
@plot_option
@threads_option
@tp_option
@weights_root_option
@json_option
@preflight_options
def bench(
    bundle: Path,
    prompt_tokens: tuple[int, ...] | None,
    context: tuple[int, ...] | None,
    batch: tuple[int, ...],
    rounds: int,
    decode_tokens: int,
    seed: int,
    plot: Path | None,
    threads: int | None,
    tp: int | None,
    weights_root: Path | None,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Measure the engine in BUNDLE: prefill, decode, and how fast this machine reads weights.

    Settings are measured by turns, and the read ceiling between them. Figures are medians; those
    that cannot be trusted are said to be doubtful, and why.
    """
    if plot is not None:
        _check_plot(plot)
    options = BenchOptions(
        prompt_tokens=prompt_tokens,
        context=context,
        batch=batch,
        rounds=rounds,
        decode_tokens=decode_tokens,
        seed=seed,
    )
    from export_grok.runtime.bench.doubts import doubts
    from export_grok.runtime.bench.measure import bench_bundle

    result = bench_bundle(
        bundle,
        options,
        threads=threads,
        tensor_parallel=tp,
        weights_root=weights_root,
        on_needs=asking(
            force=force,
            dry_run=dry_run,
            writes="nothing" if plot is None else f"a picture into {plot}",
        ),
        on_round=lambda number: _show(f"round {number} of {rounds}"),
    )
    _show("\033[K")
    if as_json:
        click.echo(json.dumps(result.to_dict() | {"doubts": doubts(result)}))
    else:
        from export_grok.runtime.bench.table import print_bench

        print_bench(result)
    if plot is not None:
        from export_grok.runtime.bench.plot import draw_bench

        draw_bench(result, plot)


def _show(text: str) -> None:
    """Show how far it is. A bar would not do: its thread would take time from what is measured."""
    if sys.stderr.isatty():
        click.echo(f"{text}\r", nl=False, err=True)


def _check_plot(path: Path) -> None:
    """Refuse what would fail only after minutes of measuring."""
    require("matplotlib", extra="plot")
    if not os.access(path.parent, os.W_OK) or not path.parent.is_dir():
        raise OutputError(
            f"cannot write {path}: {path.parent} is no folder to write in; choose another --plot"
        )
