"""A picture of a benchmark: decode beside what memory allows, and prefill."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from export_grok.files import atomic_file
from export_grok.optional import require
from export_grok.runtime.bench.doubts import doubts
from export_grok.runtime.bench.result import Bench, Measurement, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer

__all__ = ["draw_bench"]


def draw_bench(bench: Bench, path: Path) -> None:
    """Write a picture: ms/token over the context for each batch, and prefill tokens/s.

    Points are medians, bars the middle half of the rounds. A dashed line is the time in which the
    read ceiling brings the bytes of a step.

    Args:
        bench: what is drawn.
        path: .png, .svg or .pdf.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OutputError: `path` cannot be written.
    """
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_decode(left, bench)
    _draw_prefill(right, bench)
    figure.suptitle(_title(bench), fontsize="medium")
    if doubts(bench):
        figure.supxlabel(
            "Doubtful figures: the report says why.", color="firebrick", fontsize="medium"
        )
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=150)


def _draw_decode(axes: "Axes", bench: Bench) -> None:
    by_batch: dict[int, list[Measurement]] = defaultdict(list)
    for each in sorted(bench.of_stage("decode"), key=lambda each: each.setting.tokens):
        by_batch[each.setting.batch].append(each)
    shown = []
    for number, (batch, measured) in enumerate(sorted(by_batch.items())):
        contexts = [each.setting.tokens for each in measured]
        times = [each.step_seconds for each in measured]
        shown.append(_draw_spreads(axes, contexts, times, 1e3, f"batch {batch}", f"C{number}"))
        least = [each.traffic.total for each in measured if each.traffic is not None]
        axes.plot(
            contexts,
            [1e3 * count / bench.ceiling.median for count in least],
            linestyle="--",
            marker="_",
            markersize=14,
            color=f"C{number}",
        )
    (dashes,) = axes.plot([], [], linestyle="--", color="grey", label="bytes / read ceiling")
    axes.set(
        xlabel="context, tokens in the cache",
        ylabel="ms/token",
        title="decode, a token for each row",
    )
    axes.legend(handles=[*shown, dashes])
    _scale(axes, sorted({each.setting.tokens for each in bench.of_stage("decode")}))


def _draw_prefill(axes: "Axes", bench: Bench) -> None:
    measured = sorted(bench.of_stage("prefill"), key=lambda each: each.setting.tokens)
    lengths = [each.setting.tokens for each in measured]
    speeds = [each.tokens_per_second for each in measured]
    _draw_spreads(axes, lengths, speeds, 1, "", "C0")
    axes.set(
        xlabel="prompt, tokens",
        ylabel="tokens/s",
        title=f"prefill, batch {bench.options.batch[0]}",
    )
    _scale(axes, lengths)


def _draw_spreads(
    axes: "Axes",
    places: Sequence[int],
    spreads: Sequence[Spread],
    factor: float,
    label: str,
    color: str,
) -> "ErrorbarContainer":
    medians = [factor * spread.median for spread in spreads]
    below = [factor * (spread.median - spread.low) for spread in spreads]
    above = [factor * (spread.high - spread.median) for spread in spreads]
    return axes.errorbar(
        places, medians, (below, above), marker="o", capsize=4, color=color, label=label
    )


def _scale(axes: "Axes", places: Sequence[int]) -> None:
    """Let values begin at 0, and name the places that were measured and no others."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xticks([], minor=True)
    axes.set_xlim(places[0] / 1.3, places[-1] * 1.3)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)


def _title(bench: Bench) -> str:
    kernels = bench.engine.kernels
    which = f"native kernels ({kernels.isa})" if kernels.library else "built-in kernels"
    return (
        f"{bench.engine.folder.resolve().name}: {which} on {bench.machine.cpu}, "
        f"{bench.threads} threads; read ceiling {bench.ceiling.median / 1e9:.1f} GB/s; "
        f"medians and middle half, rounds: {bench.options.rounds}"
    )
