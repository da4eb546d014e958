"""Progress of long work, on stderr; quiet where stderr is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["progress_bar"]

# A bar within a bar would flicker below it, and rich before 14.1 refuses it.
_showing = ContextVar("showing", default=False)


@contextmanager
def progress_bar(label: str, total: int, *, unit: str = "it") -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and time left while the block runs, unless one is shown already.

    Args:
        label: what is being done.
        total: how much there is.
        unit: "bytes" for a length in bytes, else the name of one piece.

    Yields:
        A function that takes how much was done since it was last called.
    """
    if not sys.stderr.isatty() or _showing.get():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counted: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()]
        if unit == "bytes"
        else [MofNCompleteColumn(), TextColumn(f"{unit}  {{task.fields[rate]}}")]
    )
    columns = [TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn()]
    _showing.set(True)
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task(label, total=total, rate="")

            def advance(done: int) -> None:
                shown.advance(task, done)
                speed = shown.tasks[task].speed
                shown.update(task, rate=f"{speed:.1f}/s" if speed else "")

            yield advance
    finally:
        _showing.set(False)
