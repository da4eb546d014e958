"""Pictures of a comparison, as SVG that stands in a page: errors by layer, by step, running free.

Text stays text, and the same result gives the same bytes. A value of 0, which a log axis has no
place for, lies on the lower edge; infinity, which stands for what is no number too, on the upper.
"""

import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from export_grok.optional import require
from export_grok.runtime.verify.result import Verification

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["free_run_plot", "layers_plot", "steps_plot"]

Lines = Mapping[str, Sequence[float | None]]

# Colours that the colour-blind tell apart (Okabe and Ito), and markers for those who print.
LOOKS = {
    "h": ("#777777", "p"),
    "k_out": ("#0072B2", "o"),
    "v_out": ("#56B4E9", "s"),
    "heads": ("#E69F00", "^"),
    "attention": ("#8C510A", "v"),
    "gates": ("#CC79A7", "P"),
    "moe": ("#009E73", "D"),
    "h_out": ("#222222", "X"),
    "logits": ("#7B3294", "*"),
}
WRONG = "#C8102E"
CHARACTERS = 120  # that fit below a picture
DODGED = 12  # up to so many columns the tensors of one lie side by side


def layers_plot(result: Verification) -> str:
    """Return error / tolerance of each tensor in each graph, the worst of all steps.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    names = [str(graph.graph).removeprefix("layer ") for graph in result.graphs]
    lines: dict[str, list[float | None]] = {}
    for number, graph in enumerate(result.graphs):
        for found in graph.deviations:
            line = lines.setdefault(found.tensor, [None] * len(names))
            line[number] = max(line[number] or 0.0, found.ratio)
    wrong = [number for number, graph in enumerate(result.graphs) if not graph.passed]
    return _picture(
        "layers",
        "Error / tolerance by layer",
        names,
        _drawn(lines),
        limit=1.0,
        wrong=wrong,
        labels=("layer", "error / tolerance"),
    )


def steps_plot(result: Verification) -> str:
    """Return error / tolerance of each tensor in each step, the worst of all graphs.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    every = [found for graph in result.graphs for found in graph.deviations]
    names = list(dict.fromkeys(found.step for found in every))
    lines: dict[str, list[float | None]] = {}
    for found in every:
        line = lines.setdefault(found.tensor, [None] * len(names))
        number = names.index(found.step)
        line[number] = max(line[number] or 0.0, found.ratio)
    failed = {found.step for found in every if not found.passed}
    return _picture(
        "steps",
        "Error / tolerance by step",
        names,
        _drawn(lines),
        limit=1.0,
        wrong=[number for number, name in enumerate(names) if name in failed],
        labels=("", "error / tolerance"),
    )


def free_run_plot(result: Verification) -> str:
    """Return the logits' error in each step when the whole model runs free; "" if it did not.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    free = result.free_run
    if free is None:
        return ""
    names = list(free.error)
    lines: dict[str, Sequence[float | None]] = {"engine": list(free.error.values())}
    if free.floor is not None:
        lines["the original's roundings alone"] = [free.floor.error.get(name) for name in names]
    return _picture(
        "free",
        "Error of the logits by step, running free",
        names,
        lines,
        limit=free.tolerance if free.floor is None else None,
        wrong=[],
        labels=("", "error of the logits"),
    )


def _drawn(lines: Lines) -> Lines:
    """Return the tensors that have a look, in their order; choices of experts are counted."""
    return {name: lines[name] for name in LOOKS if name in lines}


def _picture(
    name: str,
    title: str,
    columns: Sequence[str],
    lines: Lines,
    *,
    limit: float | None,
    wrong: Sequence[int],
    labels: tuple[str, str],
) -> str:
    require("matplotlib", extra="verify")
    from matplotlib import rc_context, style
    from matplotlib.figure import Figure

    svg = io.StringIO()
    with (
        style.context("default"),
        rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9.0}),
    ):
        figure = Figure(figsize=(9, 3.7), layout="constrained")
        axes = figure.subplots()
        _draw(axes, columns, lines, limit, wrong)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        count = len(axes.get_legend_handles_labels()[0])
        figure.legend(
            loc="outside upper left",
            ncols=max(count, 1),
            frameon=False,
            fontsize=8.5,
            columnspacing=1.2,
            handlelength=1.6,
        )
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(svg, format="svg", metadata=nothing, transparent=True)
    return _inline(svg.getvalue(), name, title)


def _draw(
    axes: "Axes",
    columns: Sequence[str],
    lines: Lines,
    limit: float | None,
    wrong: Sequence[int],
) -> None:
    values = [value for line in lines.values() for value in line if value is not None]
    low, high = _scale(axes, [*values, *([] if limit is None else [limit])])
    many, places = len(columns) > DODGED, range(len(columns))
    if many and wrong:
        above = axes.get_xaxis_transform()
        axes.text(wrong[0], 1.01, columns[wrong[0]], color=WRONG, ha="center", transform=above)
    for column in wrong:
        axes.axvspan(column - 0.5, column + 0.5, color=WRONG, alpha=0.13, lw=0)
    for number, (name, line) in enumerate(lines.items()):
        color, marker = LOOKS.get(name, (f"C{number}", "o"))
        axes.plot(
            [column if many else column + _aside(lines, name, column) for column in places],
            [math.nan if value is None else _between(value, low, high) for value in line],
            color=color,
            marker=marker,
            markersize=3.5 if many else 6,
            linewidth=0.8,
            alpha=0.9,
            label=name,
            clip_on=False,
        )
    if limit is not None:
        axes.axhline(limit, color=WRONG, linestyle="--", linewidth=1.3, label="tolerance")
    axes.set_xlim(-0.6, len(columns) - 0.4)
    shown = _spaced(columns)
    axes.set_xticks(shown, [columns[number] for number in shown])
    axes.grid(axis="y", alpha=0.3)


def _aside(lines: Lines, name: str, column: int) -> float:
    """Return how far from the middle of its column a marker is, so that none hides another."""
    there = [other for other, line in lines.items() if line[column] is not None]
    if name not in there:
        return 0.0
    return (there.index(name) - (len(there) - 1) / 2) * 0.6 / len(there)


def _between(value: float, low: float, high: float) -> float:
    return high if math.isnan(value) else min(max(value, low), high)


def _scale(axes: "Axes", values: Sequence[float]) -> tuple[float, float]:
    """Make the y axis logarithmic, with whole decades; return where 0 and infinity lie."""
    measured = [value for value in values if 0 < value < math.inf]
    first = math.floor(math.log10(min(measured, default=0.1) / 1.5))
    last = max(math.ceil(math.log10(1.5 * max(measured, default=1.0))), first + 2)
    every = 1 + (last - first) // 9
    ticks = {10.0**power: f"{10.0**power:g}" for power in range(first, last + 1, every)}
    low, high = 10.0**first, 10.0**last
    if 0 in values:
        low = 10.0 ** (first - 0.6 * every)
        ticks[low] = "0"
    if not all(map(math.isfinite, values)):
        high = 10.0 ** (last + 0.6 * every)
        ticks[high] = "inf"
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_yticks([], minor=True)
    return low, high


def _spaced(columns: Sequence[str]) -> list[int]:
    """Return the columns whose names have room: the first, the last, round numbers between."""
    room = CHARACTERS // (2 + max(len(name) for name in columns))
    every = 1
    while len(columns) > room * every:
        every *= 2
    last = len(columns) - 1
    shown = [0]
    for place in range(1, last):
        numbered = re.search(r"\d+$", columns[place])
        if every == 1 or (
            numbered is not None
            and int(numbered[0]) % every == 0
            and min(place - shown[-1], last - place) >= every / 2
        ):
            shown.append(place)
    return shown + [last] * (last > 0)


def _inline(svg: str, name: str, title: str) -> str:
    """Return the element alone; the page gives its size, its font and how lines end.

    In HTML it needs no namespace. Its ids are made those of one picture of the page.
    """
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'\s(xmlns(:\w+)?|width|height|version)="[^"]*"', "", svg, count=5)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
