"""What came of the steps: a line each, the summary, JSON, and a section of a Markdown file."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sections import write_section
from export_grok.files import atomic_file
from scripts.gpu.step import Outcome
from scripts.gpu.steps import STEPS

__all__ = ["line", "section", "summary", "table", "write_json", "write_report"]

WORDS = {"pass": "PASS", "fail": "FAIL", "skip": "skipped"}
NOT_RUN = "not run yet"


def line(key: str, outcome: Outcome) -> str:
    """Return what is printed behind a step."""
    return f"{WORDS[outcome.status]:7} {key}  {outcome.text}  ({outcome.seconds:.1f} s)"


def summary(outcomes: Mapping[str, Outcome]) -> str:
    """Return how many steps passed, failed and were skipped, and which."""
    parts = []
    for status, word in (("pass", "passed"), ("fail", "failed"), ("skip", "skipped")):
        keys = [key for key, outcome in outcomes.items() if outcome.status == status]
        if keys:
            parts.append(f"{len(keys)} {word} ({' '.join(keys)})")
    return ", ".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def section(outcomes: Mapping[str, Outcome]) -> str:
    """Return the results in Markdown; a step that is not among them was not run yet."""
    rows = []
    for step in STEPS:
        outcome = outcomes.get(step.key)
        word, text = (NOT_RUN, "") if outcome is None else (WORDS[outcome.status], outcome.text)
        rows.append([step.key, step.title, word, _cell(text)])
    parts = ["## Results", table(["step", "what is checked", "result", "figures"], rows)]
    for step in STEPS:
        found = outcomes.get(step.key)
        if found is not None and found.table:
            parts += [f"### Step {step.key}: {step.title}", found.table]
    return "\n\n".join(parts)


def write_report(file: Path, outcomes: Mapping[str, Outcome], command: str) -> None:
    """Write the results into a section of a Markdown file.

    Raises:
        OutputError: it cannot be written.
    """
    below = f"Written by\n\n    {command}"
    write_section(file, "results", above=section(outcomes), below=below)


def write_json(file: Path, outcomes: Mapping[str, Outcome], command: str) -> None:
    """Write all figures. A number that JSON has not, as an infinite error, becomes null.

    Raises:
        OutputError: it cannot be written.
    """
    found = {key: dataclasses.asdict(outcome) for key, outcome in outcomes.items()}
    with atomic_file(file) as out:
        content = {"command": command, "steps": _finite(found)}
        out.write(json.dumps(content, indent=1, allow_nan=False).encode())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
