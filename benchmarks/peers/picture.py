"""The picture of a comparison: time for a token, and prefill, a point for each round."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from results import Row
from storage import bytes_per_token
from tables import QUANTITIES, Comparison

from export_grok.files import atomic_file
from export_grok.optional import require

__all__ = ["draw"]

DOTS = 150


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture to `path`, a .png.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OutputError: it cannot be written.
    """
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure

    def speed(row: Row) -> float:
        return 512 / QUANTITIES["prefill 512"](row)

    names = [peer.name for peer in comparison.peers]
    figure = Figure(figsize=(9, 1.1 + 0.45 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    panels: list[tuple[Any, str, Callable[[Row], float]]] = [
        (left, "ms a token, batch 1 (shorter is better)", QUANTITIES["decode"]),
        (right, "tokens/s, prefill of 512 (longer is better)", speed),
    ]
    for axes, label, value in panels:
        spreads = [comparison.results.spread(name, value) for name in names]
        colours = ["C1" if name.startswith("grok") else "C0" for name in names]
        axes.barh(names, [spread.median for spread in spreads], color=colours, alpha=0.5)
        for place, spread in enumerate(spreads):
            axes.plot(spread.values, [place] * len(spread.values), "k.", markersize=3)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    for place, peer in enumerate(comparison.peers):
        nbytes = bytes_per_token(comparison.config, peer.matrices, peer.head)
        ideal = np.median(
            [
                nbytes / row["ceiling_gb_s"] / 1e6
                for row in comparison.results.rows[peer.name].values()
            ]
        )
        (line,) = left.plot([ideal, ideal], [place - 0.4, place + 0.4], "r-")
    left.invert_yaxis()
    figure.legend(
        [line], ["its bytes at the read ceiling"], loc="outside upper left", frameon=False
    )
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS)
    with atomic_file(path) as file:
        file.write(content.getvalue())
