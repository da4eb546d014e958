"""The section of a report about growth: a picture, a table for each curve, how it was measured."""

import datetime
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from growth_picture import draw
from growth_results import Curve, Point
from sections import write_section

from export_grok.config import GrokConfig

__all__ = ["tables", "write_report"]

ABOVE = """\
## How a step of decoding grows

A step gives each row of the batch one token. On {cpu},
{threads} threads, {kernels}, {day}; read ceiling {slowest:.1f} to {fastest:.1f} GB/s.

![Time of a step over context, batch and layers, and what memory allows]({picture})

{tables}"""

BELOW = """\
The model is a random Grok-1 of middle size: {layers} layers or the first of them, width {width},
{query_heads} query and {kv_heads} key/value heads of {head}, {experts} experts of {ffn} ({chosen}
chosen), vocabulary {vocabulary}, head in int8. Expected is the time in which the read ceiling
brings the bytes that a step has to read ("MB"): attention matrices, chosen experts, head, and keys
and values of every token in the cache. "experts" are the different ones that are counted in a
layer: for a batch what is expected if all choices are equally likely. The ceiling is what as many
threads can read if they do nothing else, measured in the same run before and after every
measurement.

Figures are medians of {rounds} rounds of {steps} steps, with the range of the rounds behind them;
the ratio is the median of the rounds' ratios. Doubts are those that `export-grok bench` has of the
run. Again:

    python benchmarks/growth.py DIR --report docs/performance.md"""


def write_report(
    report: Path, curves: Sequence[Curve], config: GrokConfig, runs: Sequence[dict[str, Any]]
) -> None:
    """Write the section into `report`, and the picture beside it.

    Args:
        report: Markdown file.
        curves: in the order of the report.
        config: of the whole checkpoint.
        runs: what every run of bench printed.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OutputError: a file cannot be written.
    """
    picture = report.with_name("growth.png")
    draw(curves, picture)
    machine, kernels = runs[0]["machine"], runs[0]["engine"]["kernels"]
    ceilings = [run["ceiling"]["bytes_per_second"]["median"] / 1e9 for run in runs]
    above = ABOVE.format(
        cpu=f"{machine['cpu']}, {machine['cores']} cores",
        threads=machine["threads"],
        kernels=f"native kernels ({kernels['isa']})" if kernels["isa"] else "built-in kernels",
        day=datetime.date.today(),
        slowest=min(ceilings),
        fastest=max(ceilings),
        picture=picture.name,
        tables=tables(curves),
    )
    below = BELOW.format(
        layers=config.num_layers,
        width=config.emb_size,
        query_heads=config.num_q_heads,
        kv_heads=config.num_kv_heads,
        head=config.key_size,
        experts=config.num_experts,
        ffn=config.ffn_size,
        chosen=config.num_selected_experts,
        vocabulary=config.vocab_size,
        rounds=runs[0]["options"]["rounds"],
        steps=runs[0]["options"]["decode_tokens"],
    )
    write_section(report, "growth", above=above, below=below)


def tables(curves: Sequence[Curve]) -> str:
    """Return a table for each curve, and what is doubtful about them, as Markdown."""
    doubts = list(dict.fromkeys(doubt for curve in curves for doubt in curve.doubts))
    parts = [_table(curve, doubts) for curve in curves]
    if doubts:
        numbered = [f"{number}. {doubt}" for number, doubt in enumerate(doubts, 1)]
        parts.append("Doubts:\n\n" + "\n".join(numbered))
    return "\n\n".join(parts)


def _table(curve: Curve, doubts: Sequence[str]) -> str:
    head = [curve.name, "ms a step", "range", "experts", "MB", "expected ms", "ratio", "doubts"]
    rows = [head, ["---:"] * len(head), *(_row(point, doubts) for point in curve.points)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return f"With {curve.name} ({curve.fixed}):\n\n" + "\n".join(lines)


def _row(point: Point, doubts: Sequence[str]) -> list[str]:
    return [
        str(point.value),
        f"{1e3 * statistics.median(point.seconds):.1f}",
        f"{1e3 * min(point.seconds):.1f}-{1e3 * max(point.seconds):.1f}",
        f"{point.experts:.2f}",
        f"{point.step_bytes / 1e6:,.0f}",
        f"{1e3 * statistics.median(point.expected):.1f}",
        f"{point.ratio:.2f}",
        ", ".join(str(doubts.index(doubt) + 1) for doubt in point.doubts) or "none",
    ]
