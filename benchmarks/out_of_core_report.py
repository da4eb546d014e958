"""The section of a report about a model that is larger than memory: text, table, picture."""

import datetime
import io
from collections.abc import Sequence
from pathlib import Path

from out_of_core_result import Result, Token
from sections import write_section

from export_grok.files import atomic_file
from export_grok.machine import this_machine
from export_grok.optional import require
from export_grok.plugins.kernels import native_kernels

__all__ = ["table", "write_report"]

DOTS = 110

ABOVE = """\
## A model larger than memory

The weights of {layers} of full size and the head are {touchable:.2f} GB in int8; the process that
decodes has memory for {limit:.2f} GB of them, {part:.0%}. Pages of the weights that find no room
are dropped by the system and come from the disk again. On {cpu}, {cores} cores,
native kernels ({isa}), {day}.

![Time of a token, and what is read from the disk meanwhile]({picture})

{table}"""

BELOW = """\
Tokens are random and fed one by one at batch 1; both runs have the same, and a first token that
loads what is loaded late is not counted. With the limit the process runs in a control group of
{limit:.2f} GB, which counts its own memory and the file pages that it reads; all weights were
dropped from memory before. Without it all tokens were decoded once before. A token has to read
{step:.2f} GB, from memory or disk; "from the disk" is what the system read for the process
(`read_bytes`). The disk was measured in the same run before and after: two threads that read
16 MiB at a time past the system's caches (O_DIRECT), each time another half of a file that
decoding leaves alone. Again, as root:

    python benchmarks/out_of_core.py DIR --memory-share {share:.2g} --report docs/performance.md"""


def write_report(report: Path, result: Result) -> None:
    """Write the section into `report`, and the picture beside it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OutputError: a file cannot be written.
    """
    picture = report.with_name("out_of_core.png")
    _draw(result, picture)
    machine, part = this_machine(), result.limit / result.touchable
    above = ABOVE.format(
        layers="a layer" if result.layers == 1 else f"{result.layers} layers",
        touchable=result.touchable / 1e9,
        limit=result.limit / 1e9,
        part=part,
        cpu=machine.cpu,
        cores=machine.cores,
        isa=native_kernels().isa,
        day=datetime.date.today(),
        picture=picture.name,
        table=table(result),
    )
    below = BELOW.format(limit=result.limit / 1e9, step=result.step_bytes / 1e9, share=part)
    write_section(report, "out-of-core", above=above, below=below)


def table(result: Result) -> str:
    """Return what was measured, and what is doubtful about it, as Markdown."""
    head = ["token", "s", "GB from the disk", "GB/s", "of the disk", "s without the limit"]
    pairs = zip(result.limited.tokens, result.free.tokens, strict=True)
    rows = [
        [str(number), *_figures(limited, result), f"{free.seconds:.3f}"]
        for number, (limited, free) in enumerate(pairs, 1)
    ]
    lines = [_line(head), _line(["---:"] * len(head)), *map(_line, rows)]
    before, after = (rate / 1e9 for rate in result.disk)
    facts = [
        f"- Medians: {result.limited.seconds:.2f} s a token with the limit, "
        f"{result.free.seconds:.3f} s without; {result.share:.0%} of the disk's bandwidth, which "
        f"was {before:.2f} GB/s before and {after:.2f} GB/s after.",
        f"- Peak memory with the limit: {_megabytes(result.limited.private)} private (RssAnon); "
        f"{_megabytes(result.most_used)} in the group, file pages included, of "
        f"{_megabytes(result.limit)}. Without it {_megabytes(result.free.private)} private.",
        *(f"- Doubtful: {doubt}." for doubt in result.doubts()),
    ]
    return "\n".join([*lines, "", *facts])


def _figures(token: Token, result: Result) -> list[str]:
    return [
        f"{token.seconds:.2f}",
        f"{token.bytes / 1e9:.2f}",
        f"{token.rate / 1e9:.2f}",
        f"{token.rate / result.disk_rate:.0%}",
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _megabytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e6:,.0f} MB"


def _draw(result: Result, path: Path) -> None:
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure

    numbers = list(range(1, len(result.limited.tokens) + 1))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run, label, color in (
        (result.limited, f"memory for {result.limit / 1e9:.2f} GB", "C0"),
        (result.free, "no limit", "C1"),
    ):
        left.plot(numbers, [token.seconds for token in run.tokens], "o-", color=color, label=label)
    left.set(xlabel="token", ylabel="s a token")
    right.plot(numbers, [token.rate / 1e9 for token in result.limited.tokens], "o-", color="C0")
    for rate, label in zip(result.disk, ("disk, before", "disk, after"), strict=True):
        style = "--" if label.endswith("before") else ":"
        right.axhline(rate / 1e9, color="red", linestyle=style, label=label)
    right.set(xlabel="token", ylabel="GB/s from the disk")
    for axes in (left, right):
        axes.set_xticks(numbers)
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS)
    with atomic_file(path) as file:
        file.write(content.getvalue())
