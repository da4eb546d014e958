"""Sections of a report that several programs write, each between marker lines of its own."""

import re
from pathlib import Path

from export_grok.errors import OutputError
from export_grok.files import atomic_file
from export_grok.optional import require

__all__ = ["check_report", "write_section"]

# What stands between these two is kept by peers/report.py, which writes the rest of the file: so
# the sections stand there.
KEPT = "<!-- by hand from here: kept when this file is written again -->"
TO_HERE = "<!-- to here -->"


def check_report(report: Path) -> None:
    """Refuse what would fail only after minutes of measuring.

    Raises:
        MissingDependencyError: matplotlib, which draws the picture, is not installed.
        OutputError: the report's folder is not there.
    """
    require("matplotlib", extra="plot")
    if not report.parent.is_dir():
        raise OutputError(
            f"cannot write {report}: {report.parent} is no folder; choose another --report"
        )


def write_section(report: Path, name: str, *, above: str, below: str) -> None:
    """Write a section; the rest of the file stays as it is, and so does text by hand within it.

    A section that the file does not have yet goes behind the others. A file that is not there is
    begun with a title.

    Args:
        report: Markdown file.
        name: of the section, in its marker lines.
        above: what stands above the text by hand, from the heading on.
        below: what stands below it.

    Raises:
        OutputError: the file cannot be written.
    """
    text = report.read_text() if report.exists() else f"# Performance\n\n{KEPT}\n{TO_HERE}\n"
    begin, end = f"<!-- {name}: written by a program -->", f"<!-- end of {name} -->"
    hand, to_here = f"<!-- {name}, by hand from here: kept -->", f"<!-- {name}, to here -->"
    by_hand = _between(text, hand, to_here) or "\n"
    section = "\n".join([begin, above, "", f"{hand}{by_hand}{to_here}", "", below, end])
    old = _between(text, begin, end)
    if old is not None:
        text = text.replace(f"{begin}{old}{end}", section)
    elif TO_HERE in text:
        before, after = text.split(TO_HERE, 1)
        text = f"{before}{section}\n\n{TO_HERE}{after}"
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    with atomic_file(report) as file:
        file.write(text.encode())


def _between(text: str, begin: str, end: str) -> str | None:
    found = re.search(f"{re.escape(begin)}(.*?){re.escape(end)}", text, re.DOTALL)
    return found[1] if found else None
