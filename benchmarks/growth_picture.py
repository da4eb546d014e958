"""The picture of growth: a panel for each curve, measured times beside the expected ones."""

import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from growth_results import Curve

from export_grok.files import atomic_file
from export_grok.optional import require

__all__ = ["draw"]

DOTS = 110


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture to `path`, a .png.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OutputError: it cannot be written.
    """
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3.8), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        values = [point.value for point in curve.points]
        medians, lows, highs = (
            [1e3 * of(point.seconds) for point in curve.points]
            for of in (statistics.median, min, max)
        )
        below = [median - low for median, low in zip(medians, lows, strict=True)]
        above = [high - median for median, high in zip(medians, highs, strict=True)]
        axes.errorbar(values, medians, (below, above), marker="o", capsize=4, label="measured")
        expected = [1e3 * statistics.median(point.expected) for point in curve.points]
        axes.plot(values, expected, "--", marker="_", markersize=12, color="red", label="expected")
        axes.set(xlabel=curve.name, ylabel="ms a step", title=curve.fixed)
        # Both axes from 0: what is proportional to what grows is a straight line.
        axes.set_xlim(0, 1.05 * values[-1])
        axes.set_ylim(0, 1.3 * max(highs))
        axes.set_xticks(values, [str(value) for value in values], rotation=60, fontsize="small")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS)
    with atomic_file(path) as file:
        file.write(content.getvalue())
