"""The section of a report about many requests at once: a picture and three tables."""

import datetime
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batching_rows import NEW_TOKENS, PROMPTS, REQUESTS, Throughput
from batching_steps import CONTEXT, STEPS, Steps
from batching_waits import LONG, PROMPT, ROWS, SHORT, Wait
from others import MOST
from sections import write_section

from export_grok.files import atomic_file
from export_grok.machine import this_machine
from export_grok.optional import require
from export_grok.plugins.kernels import native_kernels

__all__ = ["tables", "write_report"]

ABOVE = """\
## What many at once cost and bring

On {cpu}, {cores} cores, {kernels}, {day}. Medians of {rounds} rounds in which all settings take
turns, with the range behind them; ratios are medians of the rounds' ratios.

![Tokens a second over rows, measured and as the experts' bytes let expect]({picture})

{tables}"""

BELOW = """\
The demo model is so small that it lies in the processor's cache: what rows share there is the time
between its sums. A layer of full size (with the head, in int8) is what a Grok-1 on a CPU is made
of. Its experts were counted by running its graph with them as outputs. Again, with 9 GB of disk:

    pip install -c constraints.txt -e ".[export,onnxruntime,plot]"
    python benchmarks/batching.py DIR --report docs/serving.md"""

DOTS = 110


def write_report(
    report: Path,
    demo: Sequence[Throughput],
    layer: Sequence[Steps],
    waits: Sequence[Wait],
    others: float,
) -> None:
    """Write the section into `report`, and the picture beside it.

    Args:
        report: Markdown file.
        demo: requests through the demo model, by rows.
        layer: decode steps of a layer of full size, by rows.
        waits: of the same layer, by chunks.
        others: cores that other programs took meanwhile.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OutputError: a file cannot be written.
    """
    picture = report.with_name("batching.png")
    _draw(demo, layer, picture)
    machine, kernels = this_machine(), native_kernels()
    above = ABOVE.format(
        cpu=machine.cpu,
        cores=machine.cores,
        kernels=f"native kernels ({kernels.isa})" if kernels.library else "built-in kernels",
        day=datetime.date.today(),
        rounds=len(layer[0].seconds),
        picture=picture.name,
        tables=tables(demo, layer, waits, others),
    )
    write_section(report, "batching", above=above, below=BELOW)


def tables(
    demo: Sequence[Throughput], layer: Sequence[Steps], waits: Sequence[Wait], others: float
) -> str:
    """Return the tables as Markdown, and what is doubtful about them."""
    doubt = (
        f"Doubtful: other programs took {others:.1f} cores meanwhile. Close them, measure again."
    )
    return "\n\n".join(
        [
            f"The demo model, {REQUESTS} requests of {PROMPTS[0]} to {PROMPTS[1]} tokens that get "
            f"{NEW_TOKENS} each, so many at once:",
            _demo_table(demo),
            f"A decode step of a layer of full size and the head, {CONTEXT} to "
            f"{CONTEXT + STEPS} tokens before; expected is that time follows the bytes read:",
            _layer_table(layer),
            f"The same layer, {ROWS} rows: a prompt of {PROMPT} tokens while {ROWS - 1} others "
            "get their answers, by the tokens of a chunk. The gap is the longest time between two "
            "tokens of any of those; the bound is one chunk and one step, each measured with "
            "nothing else running:",
            _waits_table(waits),
            f"A prompt of {SHORT} tokens that comes in the midst of one of {LONG}, and when it "
            "has its first token; the bound is two chunks and a step:",
            _short_table(waits),
            *([doubt] if others > MOST else []),
        ]
    )


def _demo_table(demo: Sequence[Throughput]) -> str:
    one = demo[0].tokens_per_second
    return _table(
        ["rows", "tokens/s", "range", "times one by one"],
        [
            [
                str(each.rows),
                f"{statistics.median(each.tokens_per_second):,.0f}",
                _range(each.tokens_per_second, ",.0f"),
                f"{_ratio(each.tokens_per_second, one):.2f}",
            ]
            for each in demo
        ],
    )


def _layer_table(layer: Sequence[Steps]) -> str:
    one = layer[0]
    head = ["rows", "ms a step", "range", "times one row", "experts chosen", "expected"]
    head += ["if uniform", "expected", "MB", "tokens/s"]
    return _table(
        head,
        [
            [
                str(each.rows),
                f"{1e3 * statistics.median(each.seconds):.0f}",
                _range([1e3 * value for value in each.seconds], ".0f"),
                f"{_ratio(each.seconds, one.seconds):.2f}",
                f"{each.experts:.2f}",
                f"{each.bytes / one.bytes:.2f}",
                f"{each.uniform:.2f}",
                f"{each.uniform_bytes / one.uniform_bytes:.2f}",
                f"{each.bytes / 1e6:,.0f}",
                f"{each.rows / statistics.median(each.seconds):.1f}",
            ]
            for each in layer
        ],
    )


def _waits_table(waits: Sequence[Wait]) -> str:
    largest = waits[-1].alone
    head = ["chunk", "prefill alone, tokens/s", f"times that of {waits[-1].chunk}"]
    head += ["first token alone, s", "beside others, s", "gap, s", "bound, s", "gap / bound"]
    rows = []
    for each in waits:
        bound = [a + b for a, b in zip(each.chunk_alone, each.step_alone, strict=True)]
        rows.append(
            [
                str(each.chunk),
                f"{PROMPT / statistics.median(each.alone):.0f}",
                f"{_ratio(largest, each.alone):.2f}",
                f"{statistics.median(each.alone):.2f}",
                f"{statistics.median(each.loaded):.2f}",
                f"{statistics.median(each.gap):.2f} ({_range(each.gap, '.2f')})",
                f"{statistics.median(bound):.2f}",
                f"{_ratio(each.gap, bound):.2f} ({_range(_ratios(each.gap, bound), '.2f')})",
            ]
        )
    return _table(head, rows)


def _short_table(waits: Sequence[Wait]) -> str:
    rows = []
    for each in waits:
        bound = [2 * a + b for a, b in zip(each.chunk_alone, each.step_alone, strict=True)]
        rows.append(
            [
                str(each.chunk),
                f"{statistics.median(each.short):.2f}",
                _range(each.short, ".2f"),
                f"{statistics.median(bound):.2f}",
                f"{max(_ratios(each.short, bound)):.2f}",
                f"{LONG / PROMPT * statistics.median(each.alone):.1f}",
            ]
        )
    head = ["chunk", "first token, s", "range", "bound, s", "largest / bound"]
    return _table([*head, "if it waited for the long one, s"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---:"] * len(head), *rows])


def _ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(these, those, strict=True)]


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return statistics.median(_ratios(these, those))


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}}-{max(values):{form}}"


def _draw(demo: Sequence[Throughput], layer: Sequence[Steps], path: Path) -> None:
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _measured(left, [each.rows for each in demo], [each.tokens_per_second for each in demo])
    left.set_title("demo model, requests from end to end")
    rows = [each.rows for each in layer]
    rates = [[each.rows / second for second in each.seconds] for each in layer]
    _measured(right, rows, rates)
    one = statistics.median(rates[0])
    for label, style, bytes_of in (
        ("as the chosen experts' bytes let expect", "--", [each.bytes for each in layer]),
        ("if all choices were equally likely", ":", [each.uniform_bytes for each in layer]),
    ):
        expected = [
            one * count * bytes_of[0] / found for count, found in zip(rows, bytes_of, strict=True)
        ]
        right.plot(rows, expected, style, label=label)
    right.set_title("layer of full size and head, decode steps")
    for axes in (left, right):
        axes.set(xlabel="rows", ylabel="tokens a second")
        axes.set_xlim(0, 1.05 * rows[-1])
        axes.set_ylim(0)
        axes.set_xticks(rows)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS)
    with atomic_file(path) as file:
        file.write(content.getvalue())


def _measured(axes: Any, rows: Sequence[int], rates: Sequence[Sequence[float]]) -> None:
    medians = [statistics.median(each) for each in rates]
    below = [median - min(each) for median, each in zip(medians, rates, strict=True)]
    above = [max(each) - median for median, each in zip(medians, rates, strict=True)]
    axes.errorbar(rows, medians, (below, above), marker="o", capsize=4, label="measured")
