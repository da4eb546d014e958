"""An observer that keeps account of every request: each comes once and ends once."""

import threading
from collections import Counter

from export_grok.runtime.observer import FinishReason, Load, Usage

__all__ = ["Ledger"]


class Ledger:
    """See `export_grok.runtime.observer.Observer`. It keeps nothing of a request that has ended.

    Attributes:
        counts: of events and of tokens.
        faults: what may not be.
        most_waiting: requests that waited for a row at once.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.most_waiting = 0
        self._open: dict[str, int] = {}  # tokens of each that runs
        self._lock = threading.Lock()

    @property
    def open(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._open)

    def submitted(self, request: str, *, prompt_tokens: int) -> None:
        """Open its account."""
        if request in self._open:
            self.faults.append(f"request {request} was submitted twice")
        self._open[request] = 0
        self._count(submitted=1, prompt_tokens=prompt_tokens)

    def refused(self, error: Exception) -> None:
        """Count it; this comes from the clients' threads."""
        self._count(**{f"refused: {type(error).__name__}": 1})

    def started(self, request: str, *, waited_seconds: float, cached_tokens: int) -> None:
        """Count what it need not compute."""
        self._count(started=1, cached_tokens=cached_tokens)

    def token(self, request: str, *, seconds: float, first: bool) -> None:
        """Count a token."""
        self._open[request] += 1

    def finished(
        self, request: str, *, reason: FinishReason, usage: Usage, error: Exception | None
    ) -> None:
        """Close its account."""
        made = self._open.pop(request, None)
        if made is None:
            self.faults.append(f"request {request} ended ({reason}) without being under way")
        elif made != usage.new_tokens:
            self.faults.append(
                f"request {request} was given {made} tokens, its usage says {usage.new_tokens}"
            )
        if (error is not None) or reason == "error":
            self.faults.append(f"request {request} ended by {error!r}")
        self._count(**{f"ended: {reason}": 1, "new_tokens": usage.new_tokens})

    def stepped(self, load: Load, *, seconds: float, prefilled: int, decoded: int) -> None:
        """Count a turn of the loop."""
        self._count(turns=1, decoded=decoded, prefilled=prefilled, running=load.running)
        self.changed(load)

    def changed(self, load: Load) -> None:
        """Hold the load to what there is."""
        self.most_waiting = max(self.most_waiting, load.waiting)
        if load.running > load.batch or load.cache_tokens + load.kept_tokens > load.capacity:
            self.faults.append(f"{load} is more than there is")

    def _count(self, **events: int) -> None:
        with self._lock:
            self.counts.update(events)
