"""A conversation: each turn continues all that was said, whose keys and values are kept."""

from typing import Protocol

from export_grok.errors import RequestError
from export_grok.runtime.handle import Handle, Result
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.text.tokenizer import Tokenizer

__all__ = ["Conversation"]

GREEDY = GenerationParams()


class _Submits(Protocol):
    """The part of `runtime.model.Model` that a conversation needs."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def submit(
        self, prompt: tuple[int, ...], params: GenerationParams, *, wait: bool
    ) -> Handle: ...


class Conversation:
    """What was said so far, by both sides, as tokens.

    A turn is submitted whole; the row that holds what was said before is found again by its
    tokens, so only what is new is computed. Where another request has taken that row meanwhile,
    all is computed once more: the answer is the same, and `Usage.cached_tokens` tells. A
    conversation itself is for one thread.
    """

    def __init__(self, model: _Submits) -> None:
        """Begin without a turn."""
        self._model = model
        self._starts: list[int] = []  # tokens before each turn
        self._tokens: tuple[int, ...] = ()
        self._answering: Handle | None = None

    @property
    def turns(self) -> int:
        """How many turns there are, the one that is being answered with them."""
        return len(self._starts)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that was said, without an answer that has not ended."""
        self._settle(wait=False)
        return self._tokens

    def say(self, text: str, params: GenerationParams = GREEDY) -> Handle:
        """Say something and return what gives the answer; an answer before is waited for.

        What an answer had when it was cancelled, or when an error ended it, was said; a stop
        string was not.

        Raises:
            RequestError: `text` is empty at the first turn, or does not fit behind what was said.
        """
        self._settle(wait=True)
        tokenizer = self._model.tokenizer
        more = tokenizer.encode_more(text) if self._tokens else tokenizer.encode(text)
        prompt = (*self._tokens, *more)
        handle = self._model.submit(prompt, params, wait=True)
        self._starts.append(len(self._tokens))
        self._answering = handle
        return handle

    def rewind(self, turns: int = 1) -> None:
        """Take back the last turns; an answer under way is cancelled.

        Raises:
            RequestError: there are not so many.
        """
        if not 0 <= turns <= len(self._starts):
            raise RequestError(
                f"{turns} turns cannot be taken back; this conversation has {len(self._starts)}"
            )
        if not turns:
            return
        if self._answering is not None:
            self._answering.cancel()
            self._settle(wait=True)
        self._tokens = self._tokens[: self._starts[-turns]]
        del self._starts[-turns:]

    def _settle(self, *, wait: bool) -> None:
        handle = self._answering
        if handle is None or not (handle.done or wait):
            return
        for _ in handle.pieces():
            pass
        self._tokens = _said(handle.partial(), self._model.tokenizer)
        self._answering = None


def _said(result: Result, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the prompt and what of the answer was shown."""
    return (
        *result.prompt_tokens,
        *result.tokens[: result.shown_tokens],
        *tokenizer.encode_more(result.shown_rest),
    )
