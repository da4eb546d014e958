"""What there is to see of a model at work: events, for metrics and logs to take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["FinishReason", "Load", "Observer", "Observers", "Usage"]

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one request took, so far or in all.

    Attributes:
        prompt_tokens: of its prompt.
        cached_tokens: of these, those that a row of the cache held already.
        new_tokens: of its answer, the end token not counted.
        waited_seconds: from its submission until a row was free for it.
        first_token_seconds: from its submission to its first token; 0 while there is none.
        decode_seconds: from its first token to its last.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    new_tokens: int = 0
    waited_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first, per second; 0 if there are none."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a model is.

    Attributes:
        batch: rows there are, B.
        running: rows that a request has.
        waiting: requests without a row.
        cache_tokens: tokens in the cache of requests that run.
        kept_tokens: tokens in rows that are free, kept for prompts that begin with them.
        capacity: tokens that all rows take, B times T.
    """

    batch: int
    running: int
    waiting: int
    cache_tokens: int
    kept_tokens: int
    capacity: int


class Observer(Protocol):
    """Gets every event of a model, in its engine's thread: return at once, and raise nothing.

    `refused` alone comes in the thread that submits. What is raised all the same ends the model.

    A request is submitted, then finished once, whatever the reason; between that it may start, and
    have tokens. One that is refused was never submitted.
    """

    def submitted(self, request: str, *, prompt_tokens: int) -> None:
        """Take note that a request, named by its id, was taken on."""

    def refused(self, error: Exception) -> None:
        """Take note that a request was not taken on."""

    def started(self, request: str, *, waited_seconds: float, cached_tokens: int) -> None:
        """Take note that a request got a row."""

    def token(self, request: str, *, seconds: float, first: bool) -> None:
        """Take note of a token: of the first, since submission; else since the one before."""

    def finished(
        self, request: str, *, reason: FinishReason, usage: Usage, error: Exception | None
    ) -> None:
        """Take note that a request is at its end, with the error if that is the reason."""

    def stepped(self, load: Load, *, seconds: float, prefilled: int, decoded: int) -> None:
        """Take note of one turn of the loop.

        Args:
            load: behind it.
            seconds: that it took.
            prefilled: tokens of prompts that went through the layers in it.
            decoded: rows that got their next token in it.
        """

    def changed(self, load: Load) -> None:
        """Take note of the load whenever a request came or went between turns."""


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        """Take them; they are told in this order."""
        self._all = tuple(observers)

    def submitted(self, request: str, *, prompt_tokens: int) -> None:
        """See `Observer`."""
        for each in self._all:
            each.submitted(request, prompt_tokens=prompt_tokens)

    def refused(self, error: Exception) -> None:
        """See `Observer`."""
        for each in self._all:
            each.refused(error)

    def started(self, request: str, *, waited_seconds: float, cached_tokens: int) -> None:
        """See `Observer`."""
        for each in self._all:
            each.started(request, waited_seconds=waited_seconds, cached_tokens=cached_tokens)

    def token(self, request: str, *, seconds: float, first: bool) -> None:
        """See `Observer`."""
        for each in self._all:
            each.token(request, seconds=seconds, first=first)

    def finished(
        self, request: str, *, reason: FinishReason, usage: Usage, error: Exception | None
    ) -> None:
        """See `Observer`."""
        for each in self._all:
            each.finished(request, reason=reason, usage=usage, error=error)

    def stepped(self, load: Load, *, seconds: float, prefilled: int, decoded: int) -> None:
        """See `Observer`."""
        for each in self._all:
            each.stepped(load, seconds=seconds, prefilled=prefilled, decoded=decoded)

    def changed(self, load: Load) -> None:
        """See `Observer`."""
        for each in self._all:
            each.changed(load)
