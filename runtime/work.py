"""A request with its text and its times: what the engine's thread keeps of each."""

import dataclasses
from collections.abc import Sequence
from time import perf_counter

from export_grok.errors import ExportGrokError
from export_grok.runtime.batching.answer import Answer
from export_grok.runtime.batching.batch import Token
from export_grok.runtime.handle import Handle, Piece, Result
from export_grok.runtime.observer import FinishReason, Observer, Usage
from export_grok.runtime.sampling.logprobs import TokenLogprobs
from export_grok.runtime.text.answer_text import AnswerText
from export_grok.runtime.text.tokenizer import Tokenizer

__all__ = ["Work"]


class Work:
    """One request from its submission to its end.

    A piece is made when a token comes, and handed out by `publish`: when who reads it can rely on
    the model's load, and on every observer having seen it.

    Attributes:
        answer: its tokens.
        handle: of who submitted it.
    """

    def __init__(
        self,
        answer: Answer,
        handle: Handle,
        *,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
    ) -> None:
        """Begin, now, with nothing of the answer."""
        self.answer = answer
        self.handle = handle
        prompt = answer.request.prompt
        self._text = AnswerText(tokenizer, prompt, stop) if tokenizer is not None else None
        self._logprobs: list[TokenLogprobs] = []
        self._submitted = perf_counter()
        self._started: float | None = None
        self._first: float | None = None
        self._latest = self._submitted
        self._ready: list[Piece] = []
        self._error: ExportGrokError | None = None
        self._reason: FinishReason | None = None

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.answer.request.prompt)

    @property
    def ended(self) -> bool:
        """Whether the answer is at its end."""
        return self._reason is not None

    def started(self, observer: Observer) -> None:
        """Take note that the answer got a row."""
        self._started = perf_counter()
        observer.started(
            self.handle.id,
            waited_seconds=self._started - self._submitted,
            cached_tokens=self.answer.cached,
        )

    def take(self, token: Token, observer: Observer) -> bool:
        """Take a token or an end; return whether the text ends here by a stop string.

        Raises:
            ExportGrokError: the tokenizer has no text for the token.
        """
        if token.token is None:
            return False
        now = perf_counter()
        observer.token(self.handle.id, seconds=now - self._latest, first=self._first is None)
        self._first = self._first or now
        self._latest = now
        if token.logprobs is not None:
            self._logprobs.append(token.logprobs)
        text = self._text.push(token.token) if self._text is not None else ""
        self._ready.append(Piece(text=text, token=token.token, logprobs=token.logprobs))
        return self._text is not None and self._text.stopped

    def finish(
        self, reason: FinishReason, observer: Observer, error: ExportGrokError | None = None
    ) -> None:
        """Take note of the end, with the error if there is one."""
        rest = ""
        try:
            if self._text is not None:
                rest = self._text.finish()
        except ExportGrokError as damaged:
            reason, error = "error", error or damaged
        last = self._ready.pop() if self._ready else Piece(text="")
        self._ready.append(dataclasses.replace(last, text=last.text + rest, finish_reason=reason))
        self._reason, self._error = reason, error
        self._started = self._started or perf_counter()  # it waited until now
        observer.finished(self.handle.id, reason=reason, usage=self.usage(), error=error)

    def publish(self) -> None:
        """Hand out the pieces that were made since the last time."""
        pieces, self._ready = self._ready, []
        for piece in pieces:
            result = None if piece.finish_reason is None else self._result(piece.finish_reason)
            self.handle.put(piece, self.usage(), result=result, error=self._error)

    def usage(self) -> Usage:
        """Return tokens and times so far."""
        started = self._latest if self._started is None else self._started
        first = self._submitted if self._first is None else self._first
        return Usage(
            prompt_tokens=len(self.answer.request.prompt),
            cached_tokens=self.answer.cached,
            new_tokens=self.answer.made,
            waited_seconds=started - self._submitted,
            first_token_seconds=first - self._submitted,
            decode_seconds=self._latest - first,
        )

    def _result(self, reason: FinishReason) -> Result:
        prompt = self.answer.request.prompt
        tokens = tuple(self.answer.tokens[len(prompt) :])
        text = self._text
        wanted = self.answer.request.sampling.logprobs is not None
        return Result(
            id=self.handle.id,
            prompt_tokens=prompt,
            text="" if text is None else text.text,
            tokens=tokens,
            logprobs=tuple(self._logprobs) if wanted else None,
            finish_reason=reason,
            usage=self.usage(),
            shown_tokens=len(tokens) if text is None else text.whole,
            shown_rest="" if text is None else text.rest,
        )
