"""Where in our program something was done."""

import os
import traceback
from collections.abc import Iterable
from pathlib import Path

__all__ = ["place_in"]

_ROOT = f"{Path(__file__).resolve().parents[2]}/"
_FUZZER = "scripts/fuzzing/"


def place_in(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return file and line of the innermost step that is ours, and not the fuzzer's if one is."""
    steps = [(os.path.realpath(frame.filename), frame.lineno) for frame in stack]
    ours = [f"{path.removeprefix(_ROOT)}:{line}" for path, line in steps if path.startswith(_ROOT)]
    readers = [step for step in ours if not step.startswith(_FUZZER)]
    return next(reversed(readers or ours), "?")
