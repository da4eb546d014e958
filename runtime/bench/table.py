"""A benchmark for people: what was measured and on what, two tables, and what to doubt."""

import textwrap

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from export_grok.engines.installation import sentence
from export_grok.runtime.bench.doubts import doubts
from export_grok.runtime.bench.result import Bench

__all__ = ["print_bench"]

WIDTH = 120


def print_bench(bench: Bench) -> None:
    """Print the benchmark to stdout."""
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)

    def say(text: str) -> None:
        filled = textwrap.fill(text, console.width, subsequent_indent="  ", break_on_hyphens=False)
        console.print(filled, markup=False, soft_wrap=True)

    for line in _header(bench):
        say(line)
    for table in (_prefill_table(bench), _decode_table(bench)):
        console.print(table, "")
    for line in _legend(bench):
        say(line)
    for doubt in doubts(bench):
        say(f"DOUBTFUL: {doubt}.")


def _header(bench: Bench) -> list[str]:
    engine, ceiling = bench.engine, bench.ceiling
    loads = [f"{seconds:.2f} s (batch {batch})" for batch, seconds in engine.load_seconds.items()]
    return [
        f"{engine.folder}: {engine.backend} engine, {engine.version}, "
        f"{engine.weight_bytes / 1e6:,.1f} MB of weights",
        f"kernels {sentence(engine.kernels)}",
        f"{bench.machine.cpu}, {bench.threads} threads on {bench.machine.cores} cores",
        f"loaded in {', '.join(loads)}, after {engine.check_seconds:.2f} s of checking files; "
        f"peak memory {_megabytes(engine.private)} private, {_megabytes(engine.mapped)} of mapped "
        "files",
        f"read ceiling {ceiling.median / 1e9:.2f} GB/s (middle half "
        f"{_range(ceiling.low / 1e9, ceiling.high / 1e9)}), by {bench.method}; "
        f"{bench.reader_busy:.2f} cores busy",
    ]


def _prefill_table(bench: Bench) -> Table:
    table = _table("prefill", "prompt", "tokens\nper s", "middle half", "all", "s", "cores")
    for each in bench.of_stage("prefill"):
        speed = each.tokens_per_second
        table.add_row(
            str(each.setting.batch),
            str(each.setting.tokens),
            _number(speed.median),
            _range(speed.low, speed.high),
            _range(speed.smallest, speed.largest),
            f"{each.step_seconds.median:.3f}",
            f"{each.busy:.2f}",
        )
    return table


def _decode_table(bench: Bench) -> Table:
    table = _table(
        "decode",
        "context",
        "ms per\ntoken",
        "middle half",
        "all",
        "tokens\nper s",
        "MB",
        "share",
        "cores",
    )
    for each in bench.of_stage("decode"):
        took = each.step_seconds
        table.add_row(
            str(each.setting.batch),
            str(each.setting.tokens),
            _number(1e3 * took.median),
            _range(1e3 * took.low, 1e3 * took.high),
            _range(1e3 * took.smallest, 1e3 * took.largest),
            _number(each.tokens_per_second.median),
            "" if each.traffic is None else _number(each.traffic.total / 1e6),
            "" if each.share is None else f"{each.share.median:.0%}",
            f"{each.busy:.2f}",
        )
    return table


def _legend(bench: Bench) -> list[str]:
    options = bench.options
    lines = [
        f"Medians. Rounds: {options.rounds}, steps of decoding in each: {options.decode_tokens}, "
        "settings by turns. ms per token: a step, which gives each row of the batch a token; "
        "tokens per s: of all rows. MB: the least that a step has to read. share: of the read "
        "ceiling, MB over time and ceiling round by round. cores: that were busy.",
    ]
    chosen = {
        each.setting.batch: each.traffic.experts_per_layer
        for each in bench.of_stage("decode")
        if each.traffic is not None and each.setting.batch > 1
    }
    if chosen:
        counts = ", ".join(f"{count:.2f} (batch {batch})" for batch, count in chosen.items())
        lines.append(
            f"Different experts that a batch chooses in a layer: counted as {counts}, what is "
            "expected if all choices are equally likely."
        )
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,  # this and the next two, to fit 80 columns
        pad_edge=False,
        collapse_padding=True,
    )
    for column in ("batch", *columns):
        table.add_column(column, justify="right", overflow="fold")
    return table


def _range(low: float, high: float) -> str:
    return f"{_number(low)}-{_number(high)}"


def _number(value: float) -> str:
    """Return three digits or more, and no more decimals than that takes."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def _megabytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e6:,.0f} MB"
