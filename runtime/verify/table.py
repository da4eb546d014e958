"""A comparison for people: a line for each graph, then in words what is wrong."""

import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from export_grok.runtime.verify.finding import finding, headline
from export_grok.runtime.verify.result import FreeRun, GraphResult, Verification
from export_grok.runtime.verify.wording import counted, error_words, number, pair, percent

__all__ = ["free_run_lines", "print_verification", "settings"]

WIDTH = 120
MOST = 20  # so many graphs have a line each; of more
WORST = 10  # the worst have one
BAR = 10  # characters up to the tolerance


def print_verification(result: Verification) -> None:
    """Print what was compared to stdout; what is wrong comes last."""
    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)

    def say(text: str, style: str | None = None, indent: str = "") -> None:
        filled = textwrap.fill(
            text,
            console.width,
            initial_indent=indent,
            subsequent_indent=indent + "  ",
            break_on_hyphens=False,
        )
        console.print(filled, style=style, markup=False, soft_wrap=True)

    for line in settings(result):
        say(line)
    if result.graphs:
        console.print("", _graph_table(result), "")
        for line in _legend(result):
            say(line)
    if result.free_run is not None:
        say("running free:")
        for line in free_run_lines(result.free_run, len(result.rows)):
            say(line, indent="  ")
    for note in result.notes:
        say(f"NOTE: {note}")
    if result.passed:
        say(f"PASSED: {headline(result)}.", "bold green")
        return
    first, *rest = finding(result)
    say(f"FAILED: {first}.", "bold red")
    for line in rest:
        say(line, "red", indent="  ")


def settings(result: Verification) -> list[str]:
    """Return what was compared with what, and on which tokens, line by line."""
    rows = ", ".join(f"{count:,}" for count in result.rows)
    singly = f", the last {result.decoded} of each one at a time" if result.decoded else ""
    return [
        f"{result.bundle}: {result.engine}, {result.dtype}",
        f"held to {result.reference}",
        f"rows of {rows} tokens{singly}; {result.text}",
    ]


def free_run_lines(free: FreeRun, rows: int) -> list[str]:
    """Return what the whole engine gave beside the whole reference, line by line."""
    step = max(free.error, key=lambda name: free.error[name], default="no step")
    worst = f"largest error {number(free.error.get(step, 0.0))}, in {step}"
    others = [f"undecided at {free.undecided:,} of the others"] if free.undecided else []
    others += [f"sure at {free.firm:,}"] if free.firm else []
    lines = [
        f"logits at {counted(free.positions, 'position')}: {worst}, mean "
        f"{number(free.mean_error)}; " + _held_to(free),
        f"likeliest token: the same at {percent(free.top_1)} of the positions"
        + (f"; the reference was {' and '.join(others)}" if others else ""),
        f"KL(reference || engine) in nats: mean {number(free.kl_mean)}, largest "
        f"{number(free.kl_max)}",
        f"perplexity of these tokens: {pair(free.perplexity, free.perplexity_wanted)}",
    ]
    if free.parted is not None:
        row, token = free.parted
        by = "" if free.margin is None else f" by {number(free.margin)} of the logits' rms"
        lines.append(
            f"greedy: row {row} parts at token {token}, where the reference preferred its own{by}"
        )
    elif free.greedy:
        lines.append(f"greedy: all {free.greedy} tokens of {counted(rows, 'row')} are the same")
    return lines


def _graph_table(result: Verification) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in ("graph", "worst\ntensor"):
        table.add_column(column, no_wrap=True)
    for column in ("error", "allowed", "error /\nallowed", "", "other experts\n(near ties)"):
        table.add_column(column, no_wrap=True, justify="right")
    for graph in _shown(result):
        worst = graph.worst
        flips = f"{graph.flips:,} ({graph.near_ties:,})" if graph.choices else ""
        if worst is None:
            table.add_row(str(graph.graph), "nothing compared")
            continue
        table.add_row(
            str(graph.graph),
            worst.tensor,
            number(worst.error),
            number(worst.tolerance),
            number(worst.ratio),
            _bar(worst.ratio),
            flips,
            style=None if graph.passed else "red",
        )
    return table


def _shown(result: Verification) -> Sequence[GraphResult]:
    """Return all graphs if they are few, else the worst and the first that failed."""
    graphs = result.graphs
    if len(graphs) <= MOST:
        return graphs
    ranked = sorted(graphs, key=lambda graph: graph.ratio, reverse=True)
    kept = {graph.graph for graph in ranked[:WORST]}
    kept |= {graph.graph for graph in (result.failed,) if graph is not None}
    return [graph for graph in graphs if graph.graph in kept]


def _legend(result: Verification) -> list[str]:
    left_out = [graph for graph in result.graphs if graph not in _shown(result)]
    lines = [
        f"error: {error_words(result.dtype)}. Every graph is fed the reference's inputs: no "
        "error is handed on. other experts: tokens that chose others; near ties, where the "
        "reference was nearly undecided, are no fault. Rows, positions and other places count "
        "from 0.",
    ]
    if left_out:
        most = max(graph.ratio for graph in left_out)
        lines.insert(
            0,
            f"{len(left_out)} more graphs are not shown: their error / allowed is at most "
            f"{number(most)}.",
        )
    return lines


def _bar(part: float) -> str:
    if part > 1:
        return "#" * BAR + ">"
    return ("#" * max(1, round(BAR * part))).ljust(BAR, ".") if part else "." * BAR


def _held_to(free: FreeRun) -> str:
    if free.floor is not None:
        return f"the original's roundings alone make a mean of {number(free.floor.mean_error)}"
    return (
        f"{number(free.tolerance)} is allowed; {counted(free.beyond, 'position')} beyond, "
        f"{free.allowed:,} may be"
    )
