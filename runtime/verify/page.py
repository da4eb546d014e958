"""A comparison as one HTML page: it is read without a network, without scripts, and on paper."""

import html
from collections.abc import Iterable, Sequence

from export_grok.runtime.verify.finding import MEANING, finding, headline
from export_grok.runtime.verify.plot import free_run_plot, layers_plot, steps_plot
from export_grok.runtime.verify.result import Deviation, GraphResult, Verification
from export_grok.runtime.verify.table import free_run_lines, settings
from export_grok.runtime.verify.wording import (
    digits,
    error_words,
    number,
    percent,
    place_words,
)

__all__ = ["page_of"]

WORST = 10  # tensors that are listed with their places

STYLE = """
:root { color-scheme: light dark; --ink: #1d2127; --soft: #5b6472; --page: #ffffff;
  --line: #d9dde3; --panel: #f5f6f8; --good: #1a7f37; --bad: #b3261e; --stain: #fbe3e1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3b0; --page: #14171b;
  --line: #343a43; --panel: #1d2126; --good: #57c271; --bad: #ff8a80; --stain: #4a2320; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
header { border-left: 6px solid var(--good); padding: .1rem 0 .1rem 1rem; margin-bottom: 1.2rem; }
header.failed { border-color: var(--bad); }
header p { margin: 0; }
h1 { margin: 0 0 .4rem; font-size: 1.35rem; line-height: 1.3; overflow-wrap: anywhere; }
h1 strong { color: var(--good); }
header.failed h1 strong { color: var(--bad); }
h2 { margin: 2.2rem 0 .5rem; font-size: 1.1rem; }
p, li { overflow-wrap: anywhere; }
ul { margin: .4rem 0; padding-left: 1.2rem; }
.soft, figcaption { color: var(--soft); font-size: .92rem; }
.finding { background: var(--stain); border-radius: 6px; padding: .5rem 1rem .5rem .4rem; }
figure { margin: .6rem 0 1.4rem; }
.wide { overflow-x: auto; }
.picture { background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
svg { display: block; width: 100%; min-width: 640px; height: auto;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; }
.text { text-align: left; }
.bad { color: var(--bad); background: var(--stain); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .4rem 0; }
dt { font-weight: 600; }
dd { margin: 0; }
@media print { body { font-size: 11pt; } main { max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; } svg { min-width: 0; } .wide { overflow: visible; }
  table { font-size: 8pt; } th, td { padding: .1rem .3rem; } }
"""


def page_of(result: Verification) -> str:
    """Return the page.

    Raises:
        MissingDependencyError: matplotlib, which draws the pictures, is not installed.
    """
    title = f"{'PASSED' if result.passed else 'FAILED'}: {result.bundle}"
    # The policy holds a browser to it that nothing is loaded, whatever a name may contain.
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_safe(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            *_verdict(result),
            *_pictures(result),
            *_worst(result),
            *_experts(result),
            *_graphs(result),
            *_reading(result),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _verdict(result: Verification) -> list[str]:
    kind, word = ("passed", "PASSED") if result.passed else ("failed", "FAILED")
    lines = [
        f'<header class="{kind}">',
        f"<h1><strong>{word}</strong>: {_safe(headline(result))}.</h1>",
        *(f'<p class="soft">{_safe(line)}</p>' for line in settings(result)),
        "</header>",
    ]
    found = finding(result)[1:]
    if found:
        lines += ["<h2>What is wrong</h2>", _list(found, "finding")]
    if result.notes:
        lines += ["<h2>What was left out</h2>", _list(result.notes)]
    return lines


def _pictures(result: Verification) -> list[str]:
    lines = []
    if result.graphs:
        lines += [
            "<h2>Error of each layer</h2>",
            _figure(
                layers_plot(result),
                "The worst of all steps. Each graph is fed the reference's inputs, so no error is "
                "handed on. Above the dashed line is wrong; columns with something wrong are red.",
            ),
        ]
    if len({found.step for graph in result.graphs for found in graph.deviations}) > 1:
        lines += [
            "<h2>Error of each step</h2>",
            _figure(
                steps_plot(result),
                "The worst of all graphs: pieces of the prompts, then single tokens.",
            ),
        ]
    free = result.free_run
    if free is not None:
        lines += ["<h2>Running free</h2>", _list(free_run_lines(free, len(result.rows)))]
        if free.error:
            lines.append(
                _figure(
                    free_run_plot(result),
                    "The largest error of a position's logits when the whole engine and the whole "
                    "reference run, each by itself, on the same tokens.",
                )
            )
    return lines


def _worst(result: Verification) -> list[str]:
    every = [
        (graph, found)
        for graph in result.graphs
        for found in _worst_by_tensor(graph).values()
        if found.place is not None
    ]
    every.sort(key=lambda pair: -pair[1].ratio)
    rows = [_worst_row(graph, found) for graph, found in every[:WORST]]
    heads = ("graph", "tensor", "step", "where", "engine", "reference", "error", "/ tolerance")
    return ["<h2>The worst tensors</h2>", _table(heads, rows, texts=4)] if rows else []


def _worst_row(graph: GraphResult, found: Deviation) -> list[tuple[str, bool]]:
    place = found.place
    if place is None:
        raise AssertionError("only tensors with a place are listed")
    cells = [
        str(graph.graph),
        found.tensor,
        found.step,
        place_words(found, place),
        digits(place.value, beside=place.wanted),
        digits(place.wanted, beside=place.value),
        number(found.error),
        number(found.ratio),
    ]
    return [(cell, not found.passed) for cell in cells]


def _experts(result: Verification) -> list[str]:
    chosen = [graph for graph in result.graphs if graph.choices]
    if not chosen:
        return []
    choices, flips, near = (
        sum(getattr(graph, name) for graph in chosen) for name in ("choices", "flips", "near_ties")
    )
    told = f"{percent(1 - flips / choices)} of {choices:,} choices are the reference's."
    if flips:
        told += (
            f" Of the {flips:,} others {near:,} are near ties, where the reference was nearly "
            "undecided, which is no fault."
        )
    lines = ["<h2>Choice of experts</h2>", f"<p>{told}</p>"]
    differ = [graph for graph in chosen if graph.flips]
    rows = [
        [
            (str(graph.graph), False),
            (f"{graph.choices:,}", False),
            (f"{graph.flips:,}", False),
            (f"{graph.near_ties:,}", False),
            (f"{graph.flips - graph.near_ties:,}", graph.flips > graph.near_ties),
        ]
        for graph in differ
    ]
    heads = ("graph", "tokens", "other experts", "near ties", "wrong")
    return [*lines, _table(heads, rows, texts=1)] if rows else lines


def _graphs(result: Verification) -> list[str]:
    """Return a table of all graphs and tensors: whatever failed is here by name."""
    by_graph = {graph.graph: _worst_by_tensor(graph) for graph in result.graphs}
    known = [name for name in MEANING if any(name in found for found in by_graph.values())]
    others = dict.fromkeys(name for found in by_graph.values() for name in found)
    tensors = [*known, *(name for name in others if name not in known)]
    rows = [
        [(str(graph), False), *(_graph_cell(found.get(name)) for name in tensors)]
        for graph, found in by_graph.items()
    ]
    if not rows:
        return []
    return [
        "<h2>Every graph</h2>",
        '<p class="soft">Error / tolerance, the worst of all steps; more than 1 is wrong.</p>',
        _table(("graph", *tensors), rows, texts=1),
    ]


def _graph_cell(found: Deviation | None) -> tuple[str, bool]:
    return ("", False) if found is None else (number(found.ratio), not found.passed)


def _reading(result: Verification) -> list[str]:
    tensors = "".join(f"<dt>{name}</dt><dd>{_safe(what)}</dd>" for name, what in MEANING.items())
    return [
        "<h2>How to read this</h2>",
        f"<p>Error: {_safe(error_words(result.dtype))}. So it has no unit, and a token of small "
        "values counts as much as one of large values. Padding is left out, and slots of a cache "
        "that a step does not write have but to stay as they are. The tolerances, and why they "
        "are what they are, are in <em>docs/accuracy.md</em>. Rows, positions and other places "
        "count from 0.</p>",
        f"<dl>{tensors}</dl>",
        '<p class="soft">All figures of all steps: <a href="verification.json">verification.json'
        "</a>, where null stands for what is no finite number.</p>",
    ]


def _worst_by_tensor(graph: GraphResult) -> dict[str, Deviation]:
    worst: dict[str, Deviation] = {}
    for found in graph.deviations:
        if found.tensor not in worst or found.ratio > worst[found.tensor].ratio:
            worst[found.tensor] = found
    return worst


def _figure(picture: str, caption: str) -> str:
    return (
        f'<figure><div class="wide picture">{picture}</div>'
        f"<figcaption>{_safe(caption)}</figcaption></figure>"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[tuple[str, bool]]], texts: int) -> str:
    """Return a table of cells and whether each is wrong; the first columns hold text."""
    kinds = ["text"] * texts + [""] * (len(heads) - texts)
    head = "".join(
        f"<th{_class(kind)}>{_safe(name)}</th>" for kind, name in zip(kinds, heads, strict=True)
    )
    body = [
        "<tr>"
        + "".join(
            f"<td{_class(kind, 'bad' if wrong else '')}>{_safe(cell)}</td>"
            for kind, (cell, wrong) in zip(kinds, row, strict=True)
        )
        + "</tr>"
        for row in rows
    ]
    inner = "\n".join(body)
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{inner}\n'
        "</tbody></table></div>"
    )


def _class(*names: str) -> str:
    given = " ".join(name for name in names if name)
    return f' class="{given}"' if given else ""


def _list(lines: Iterable[str], kind: str = "") -> str:
    items = "\n".join(f"<li>{_safe(line)}</li>" for line in lines)
    inside = f"<ul>\n{items}\n</ul>"
    return f'<div class="{kind}">{inside}</div>' if kind else inside


def _safe(text: str) -> str:
    return html.escape(text)
