"""The report of `export.quantisation` for people: a table, and a picture."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from export_grok.export.quantisation import QuantisedTensor
from export_grok.files import atomic_file
from export_grok.optional import require

__all__ = ["draw_report", "print_report"]


def print_report(tensors: Sequence[QuantisedTensor]) -> None:
    """Print one row a tensor to stdout, in the order given."""
    console = Console(width=None if Console().is_terminal else 120)
    table = Table()
    table.add_column("tensor")
    columns = ("scales from", "to", "saturated", "relative error", "largest error", "SNR dB")
    for column in columns:
        table.add_column(column, justify="right")
    for tensor in tensors:
        table.add_row(
            tensor.name,
            f"{tensor.scale_min:.3g}",
            f"{tensor.scale_max:.3g}",
            f"{tensor.saturated:.3%}",
            _number(tensor.relative_error, ".3%"),
            _number(tensor.max_error, ".3g"),
            _number(tensor.noise_db, ".1f"),
        )
    console.print(table)


def draw_report(tensors: Sequence[QuantisedTensor], path: Path) -> None:
    """Write a picture: scales and error (or saturation) of every matrix over the layers.

    Args:
        tensors: what is drawn.
        path: .png, .svg or .pdf.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OutputError: `path` cannot be written.
    """
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    known = any(tensor.relative_error is not None for tensor in tensors)
    by_matrix: dict[str, dict[int, QuantisedTensor]] = defaultdict(dict)
    for tensor in tensors:
        _, layer, matrix = tensor.name.split(".", 2)
        by_matrix[matrix][int(layer)] = tensor

    figure = Figure(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for number, (matrix, of_layer) in enumerate(sorted(by_matrix.items())):
        layers = sorted(of_layer)
        shown = [of_layer[layer] for layer in layers]
        aside = 0.1 * (number - len(by_matrix) / 2)  # the bars of one layer stand side by side
        upper.vlines(
            [layer + aside for layer in layers],
            [tensor.scale_min for tensor in shown],
            [tensor.scale_max for tensor in shown],
            color=f"C{number}",
            linewidth=4,
            label=matrix,
        )
        lower.plot(
            layers,
            [tensor.noise_db if known else 100 * tensor.saturated for tensor in shown],
            marker="o",
            color=f"C{number}",
        )
    upper.set(yscale="log", ylabel="scales, from smallest to largest")
    lower.set(
        xlabel="layer",
        ylabel="signal to noise, dB" if known else "saturated values, %",
    )
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper center", ncols=4)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=150)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
