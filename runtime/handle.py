"""A request that was submitted: its pieces as they come, its end, and the way to cancel it."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from export_grok.errors import ExportGrokError
from export_grok.runtime.observer import FinishReason, Usage
from export_grok.runtime.sampling.logprobs import TokenLogprobs

__all__ = ["Handle", "Piece", "Result"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one token added to an answer, or its end.

    Attributes:
        text: that can be shown now: whole characters; often none, as of half a character, or of
            what may become a stop string.
        token: the new token; None for an end without one.
        logprobs: of the token, if they were asked for.
        finish_reason: why the answer ended here; None while it goes on.
    """

    text: str
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """An answer that ended.

    Attributes:
        id: of the request.
        prompt_tokens: what was continued.
        text: of the answer, up to a stop string; "" if the bundle has no tokenizer.
        tokens: of the answer, those of a stop string with them, an end token not.
        logprobs: of each of the tokens; None if they were not asked for.
        finish_reason: `stop` for an end token or a stop string, `length` for the limit asked for
            or the end of the cache, `cancelled`, or `error`.
        usage: tokens and times.
        shown_tokens: how many of the tokens are wholly in `text`.
        shown_rest: the part of `text` behind those.
    """

    id: str
    prompt_tokens: tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    usage: Usage
    shown_tokens: int
    shown_rest: str


class Handle:
    """A request under way. Any thread may use it; iterating gives all pieces from the first on.

    Attributes:
        id: of the request.
    """

    def __init__(self, name: str, usage: Usage, cancel: Callable[["Handle"], None]) -> None:
        """Begin without a piece; `cancel` takes a handle whose answer is no longer wanted."""
        self.id = name
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._usage = usage
        self._result: Result | None = None
        self._error: ExportGrokError | None = None

    @property
    def done(self) -> bool:
        """Whether the answer has ended."""
        return self._result is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None while it goes on."""
        return self._result.finish_reason if self._result else None

    @property
    def error(self) -> ExportGrokError | None:
        """What ended the answer, if it was an error."""
        return self._error

    @property
    def usage(self) -> Usage:
        """Tokens and times so far."""
        return self._usage

    def cancel(self) -> None:
        """End the answer after the turn that is being computed; does nothing if it has ended."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end of the answer and return it.

        Args:
            timeout: seconds to wait; without end by default.

        Raises:
            ExportGrokError: an error ended the answer; `partial` has it as far as it came.
            TimeoutError: it has not ended yet.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._result is not None, timeout):
                raise TimeoutError(f"request {self.id} has not ended after {timeout} seconds")
        if self._error is not None:
            raise self._error
        return self.partial()

    def partial(self) -> Result:
        """Return an answer that has ended as far as it came, even if an error ended it.

        Raises:
            TimeoutError: it has not ended yet.
        """
        if self._result is None:
            raise TimeoutError(f"request {self.id} has not ended yet")
        return self._result

    def __iter__(self) -> Iterator[Piece]:
        """Yield every piece as it comes, to the one with the finish reason.

        Raises:
            ExportGrokError: an error ended the answer; it is raised behind the last piece.
        """
        yield from self.pieces()
        if self._error is not None:
            raise self._error

    def pieces(self) -> Iterator[Piece]:
        """Yield every piece as it comes, to the one with the finish reason; raise nothing."""
        for number in itertools.count():
            piece = self.piece(number)
            if piece is None:
                raise AssertionError("who waits without end gets a piece")
            yield piece
            if piece.finish_reason is not None:
                return

    def piece(self, number: int, timeout: float | None = None) -> Piece | None:
        """Wait for a piece, one up to that with the finish reason, and return it.

        Args:
            number: of the piece, from 0.
            timeout: seconds to wait; without end by default.

        Returns:
            The piece; None if it did not come in that time.
        """
        with self._changed:
            if self._changed.wait_for(lambda: len(self._pieces) > number, timeout):
                return self._pieces[number]
        return None

    def put(
        self,
        piece: Piece,
        usage: Usage,
        *,
        result: Result | None = None,
        error: ExportGrokError | None = None,
    ) -> None:
        """Add a piece, with the result if it is the last one: for the thread that answers."""
        with self._changed:
            self._pieces.append(piece)
            self._usage = usage
            self._result, self._error = result, error
            self._changed.notify_all()
