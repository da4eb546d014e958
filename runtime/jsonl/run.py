"""A file of requests into a file of answers: what is missing is run, whatever ended the last run.

Answers are appended to OUT.part as they come. When all are there, OUT is written in the order of
the requests, and appears whole.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_grok.errors import (
    ClosedError,
    ExportGrokError,
    NumericsError,
    OutputError,
    RequestError,
)
from export_grok.files import output_errors
from export_grok.needs import Needs, OnNeeds
from export_grok.progress import progress_bar
from export_grok.runtime.answer_fields import answer_fields, error_fields, usage_fields
from export_grok.runtime.handle import Handle
from export_grok.runtime.jsonl.keys import Keys, basis_of
from export_grok.runtime.jsonl.requests import LineRequest, Requests
from export_grok.runtime.jsonl.results import Results
from export_grok.runtime.jsonl.source import open_source
from export_grok.runtime.model import Model
from export_grok.runtime.model_to_load import ModelToLoad
from export_grok.runtime.params import GenerationParams

__all__ = ["Answered", "answer_file", "part_of"]

# Requests that wait for each row: so many that none is idle while answers are written.
WAITING = 4
# Seconds between looks at what is done, once all requests are submitted.
LOOK = 0.05
# Of a request itself: they would come again. Any other error ends the run.
OWN_ERRORS = (NumericsError, RequestError)

Pending = list[tuple[LineRequest, Handle]]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What became of a file of requests.

    Attributes:
        answers: how many there are.
        found: how many of them an earlier run had made.
        errors: how many ended by an error.
    """

    answers: int
    found: int
    errors: int


def part_of(out: Path) -> Path:
    """Return the file that has the answers until all are there."""
    return out.with_name(f"{out.name}.part")


def answer_file(
    model: ModelToLoad,
    requests: Path,
    out: Path,
    defaults: GenerationParams,
    *,
    batch: int | None = None,
    overwrite: bool = False,
    on_needs: OnNeeds = lambda needs: None,
) -> Answered:
    """Answer all requests of a file, those that an earlier run answered left out.

    Args:
        model: that is loaded, if anything is left to do.
        requests: file of one JSON object a line; "-" is standard input.
        out: file of the answers, a line each.
        defaults: parameters of a request that does not say its own.
        batch: requests that run at once; up to 8 by default.
        overwrite: replace what `out` holds if that is something else.
        on_needs: gets what that needs, before anything is loaded or written.

    Raises:
        OutputError: `out` holds something else, cannot be written, or is being written.
        RequestError: requests are wrong; all are named, and none was run.
        ExportGrokError: the engine failed; what was answered is kept.
    """
    with open_source(requests, out.parent) as source:
        for path in (out, part_of(out)):
            if source.lies_at(path):
                raise OutputError(f"{path} is the file of requests itself; choose another --out")
        keys = Keys(basis_of(model, defaults))
        lines = Requests(source, model, defaults)
        reach = lines.check(keys)
        results = _found(out, keys, overwrite=overwrite)
        found, missing = results.answers, keys.requests - results.answers
        if results.path == out:
            on_needs(Needs())
            _remove_left(part_of(out), keys, out)
            return Answered(answers=found, found=found, errors=results.errors)
        if missing:
            rows = model.batch(batch, missing)
            with contextlib.ExitStack() as stack:

                def begin(needs: Needs) -> None:
                    rounds = -(-missing // rows)
                    on_needs(dataclasses.replace(needs, seconds=needs.seconds * rounds))
                    stack.enter_context(results.opened())  # before a model is loaded in vain

                loaded = stack.enter_context(
                    model.load(reach, batch=rows, max_waiting=WAITING * rows, on_needs=begin)
                )
                advance = stack.enter_context(progress_bar("answering", missing, unit="requests"))
                _run(loaded, lines.without(keys, results.has), results, advance)
        else:
            on_needs(Needs())
        with results.opened():
            results.write_sorted(out)
        return Answered(answers=results.answers, found=found, errors=results.errors)


def _found(out: Path, keys: Keys, *, overwrite: bool) -> Results:
    """Return the answers in `out`, if these are all; else those that are on the way to it."""
    done, part = Results(out, keys), Results(part_of(out), keys)
    done.read()
    if done.whole and (done.answers or out.exists()):
        return done
    if not done.empty and not overwrite:
        raise OutputError(
            f"{out} holds something else than the answers to these requests with these options; "
            "replace it with --overwrite, or choose another --out"
        )
    part.read()
    if part.others and not part.answers and not overwrite:
        raise OutputError(
            f"{part.path} holds answers to other requests, or with other options; to lose them "
            "give --overwrite, else choose another --out"
        )
    return part


def _remove_left(part: Path, keys: Keys, out: Path) -> None:
    """Remove what a run left that was killed between its last two steps."""
    left = Results(part, keys)
    left.read()
    if left.answers and not part.samefile(out):  # one may be a link to the other
        with output_errors(part):
            part.unlink()


def _run(
    model: Model,
    requests: Iterator[LineRequest],
    results: Results,
    advance: Callable[[int], None],
) -> None:
    pending: Pending = []

    def collect() -> None:
        nonlocal pending
        for request, handle in pending:
            if handle.done:
                results.add(_record(request, handle))
                advance(1)
        pending = [
            (request, handle) for request, handle in pending if not results.has(request.number)
        ]

    for request in requests:
        try:
            handle = model.submit(request.tokens, request.params, wait=True)
        except ClosedError:
            for _, handle in pending:
                with contextlib.suppress(ExportGrokError):
                    handle.result()
            collect()  # raises what ended the model
            raise
        pending.append((request, handle))
        collect()
    while pending:
        with contextlib.suppress(TimeoutError, ExportGrokError):
            pending[0][1].result(timeout=LOOK)
        collect()


def _record(request: LineRequest, handle: Handle) -> dict[str, Any]:
    """Return the line of an answer that has ended.

    Raises:
        ExportGrokError: what ended it is no error of the request itself.
    """
    error = None
    try:
        result = handle.result()
    except OWN_ERRORS as own:
        error, result = own, handle.partial()
    record: dict[str, Any] = {"line": request.number}
    if request.id is not None:
        record["id"] = request.id
    record |= answer_fields(result)
    if error is not None:
        record["error"] = error_fields(error)
    return {**record, "usage": usage_fields(result.usage)}
