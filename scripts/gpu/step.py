"""A step of the first hour on a GPU: what it is called, and what comes of it."""

import importlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from export_grok.errors import ExportGrokError

__all__ = ["Options", "Outcome", "Skipped", "Status", "Step", "outcome_of"]

Status = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        full: whether the sizes of Grok-1 are taken too, beside small ones.
        rounds: fresh inputs of each kernel that is checked.
        columns: of a large result that are held to the reference, drawn anew in each round.
        samples: of each time.
        backend: which package runs the plans, "trt" or "trt-rtx".
        folder: for graphs and plans.
        seed: of all random numbers.
    """

    full: bool = True
    rounds: int = 2
    columns: int = 64
    samples: int = 15
    backend: str = "trt"
    folder: str
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a step.

    Attributes:
        status: pass, fail or skip.
        text: a sentence: figures, or what is wrong, or what is missing.
        figures: for JSON.
        table: in Markdown; empty if there is none.
        seconds: that it took.
    """

    status: Status
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    table: str = ""
    seconds: float = 0.0


class Skipped(Exception):  # noqa: N818 - no fault
    """A step cannot be done here; the text says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        key: on the command line.
        title: what it checks.
        function: where it is, "module:name"; it takes `Options` and returns an `Outcome`. Its
            module is imported when it runs: some need packages that others do not.
    """

    key: str
    title: str
    function: str


def outcome_of(step: Step, options: Options) -> Outcome:
    """Run a step; whatever it raises is an outcome too."""
    began = time.perf_counter()
    try:
        module, name = step.function.split(":")
        run: Callable[[Options], Outcome] = getattr(importlib.import_module(module), name)
        outcome = run(options)
    except Skipped as reason:
        outcome = Outcome(status="skip", text=str(reason))
    except ExportGrokError as error:
        outcome = Outcome(status="fail", text=str(error))
    except Exception as error:
        # Of a driver, a compiler or ourselves: who looks for the cause needs the place.
        outcome = Outcome(
            status="fail",
            text=f"{type(error).__name__}: {error}",
            figures={"traceback": traceback.format_exc()},
        )
    return replace(outcome, seconds=time.perf_counter() - began)
