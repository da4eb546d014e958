"""The loop over a session: each turn is a chunk of the prompts, and a token for every answer."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.backend import RowSession
from export_grok.errors import ExportGrokError, NumericsError, RequestError
from export_grok.runtime.batching.answer import Answer
from export_grok.runtime.batching.rows import Rows
from export_grok.runtime.batching.schedule import chunk_of
from export_grok.runtime.observer import FinishReason, Load
from export_grok.runtime.sampling.adjust import adjusted
from export_grok.runtime.sampling.draw import row_faults, sample
from export_grok.runtime.sampling.logprobs import TokenLogprobs, token_logprobs

__all__ = ["CHUNK", "Batch", "Token", "Turn"]

# Tokens of prompts that go through the layers at once. Weights are read once a chunk.
CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Token:
    """One new token of an answer, or its end.

    Attributes:
        answer: whose.
        token: the new token; None if the answer ended by a stop token or an error.
        logprobs: of the token, if its request wants them.
        finished: why the answer ended here; None while it goes on.
        error: that ended it.
    """

    answer: Answer
    token: int | None
    logprobs: TokenLogprobs | None = None
    finished: FinishReason | None = None
    error: ExportGrokError | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn did.

    Attributes:
        tokens: new ones and ends: of the prompts that are done, then of the other answers.
        prefilled: tokens of prompts that went through the layers.
        decoded: rows that got their next token.
    """

    tokens: list[Token]
    prefilled: int
    decoded: int


class Batch:
    """Answers that share a session, each in a row of its own.

    Between turns answers are added and ended. First come, first served: an answer waits for a row,
    and no other gets one before it. An answer's tokens depend on its request alone, not on what
    else runs; docs/fidelity.md says how far that holds for the last bits of its logits.

    Args:
        session: whose cache is this batch's from now on; what it held does not matter.
        chunk: most tokens of one prompt that go through the layers at once.
        budget: most of all prompts together; `chunk` of each by default. As long as it takes to
            compute so many, and no longer, a turn keeps the other answers waiting.
        on_start: told when an answer gets its row.
    """

    def __init__(
        self,
        session: RowSession,
        *,
        chunk: int = CHUNK,
        budget: int | None = None,
        on_start: Callable[[Answer], None] = lambda answer: None,
    ) -> None:
        self._session = session
        self._chunk = chunk
        self._budget = chunk * session.batch if budget is None else budget
        self._on_start = on_start
        self._rows = Rows(session.batch, session.max_length)
        self._waiting: deque[Answer] = deque()
        self._prompts: list[Answer] = []  # the one longest without a chunk first
        self._decoding: list[Answer] = []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._prompts or self._decoding)

    def load(self) -> Load:
        """Return how busy this is."""
        batch, length = self._session.batch, self._session.max_length
        return Load(
            batch=batch,
            running=len(self._prompts) + len(self._decoding),
            waiting=len(self._waiting),
            cache_tokens=self._rows.used_tokens,
            kept_tokens=self._rows.kept_tokens,
            capacity=batch * length,
        )

    def add(self, answer: Answer) -> None:
        """Take on an answer; it gets a row in a turn to come."""
        self._waiting.append(answer)

    def end(self, answer: Answer, reason: FinishReason) -> None:
        """End an answer, wherever it is; its row is free, and keeps what it holds."""
        if answer.finished is not None:
            return
        answer.finished = reason
        for place in (self._waiting, self._prompts, self._decoding):
            if answer in place:
                place.remove(answer)
        if answer.row is not None:
            # Where logits are no numbers, keys and values may be none.
            self._rows.let_go(answer.row, keep=reason != "error")

    def turn(self) -> Turn:
        """Give free rows away, bring a chunk of prompts, and every answer's next token.

        An answer that cannot be continued ends with the error; the others go on.

        Raises:
            ExportGrokError: of the session: none of the answers can go on.
        """
        self._admit()
        decoding = sorted(self._decoding, key=_row)
        tokens: list[Token] = []
        prefilled = 0
        if self._prompts:
            prefilled, tokens = self._prefill()
        if decoding:
            tokens += self._decode(decoding)
        return Turn(tokens=tokens, prefilled=prefilled, decoded=len(decoding))

    def _admit(self) -> None:
        while self._waiting and self._rows.free:
            answer = self._waiting.popleft()
            taken = self._rows.take(answer.tokens)
            if taken.source != taken.row:
                self._session.copy(taken.source, taken.row, taken.cached)
            answer.row = taken.row
            answer.held = answer.cached = taken.cached
            self._prompts.append(answer)
            self._on_start(answer)

    def _prefill(self) -> tuple[int, list[Token]]:
        session = self._session
        chosen, width = chunk_of(
            self._prompts,
            chunk=self._chunk,
            budget=self._budget,
            together=session.prefill_rows,
            max_length=session.max_length,
        )
        self._prompts = self._prompts[len(chosen) :] + chosen
        chosen.sort(key=_row)
        tokens = np.zeros((len(chosen), width), np.int64)
        taken = [min(width, answer.missing) for answer in chosen]
        for line, answer, count in zip(tokens, chosen, taken, strict=True):
            line[:count] = answer.tokens[answer.held : answer.held + count]
        ends = [count == answer.missing for answer, count in zip(chosen, taken, strict=True)]
        last = np.array(taken) - 1 if any(ends) else None
        logits = self._forward(chosen, tokens, taken, last)
        ready = [answer for answer, end in zip(chosen, ends, strict=True) if end]
        for answer in ready:
            self._prompts.remove(answer)
            self._decoding.append(answer)
        if logits is None:
            return sum(taken), []
        return sum(taken), self._draw(ready, logits[np.array(ends)])

    def _decode(self, answers: list[Answer]) -> list[Token]:
        tokens = np.array([answer.tokens[-1:] for answer in answers], np.int64)
        logits = self._forward(answers, tokens, [1] * len(answers), np.zeros(len(answers), int))
        return self._draw(answers, logits)

    def _forward(
        self,
        answers: list[Answer],
        tokens: NDArray[np.int64],
        taken: list[int],
        last: NDArray[np.int64] | None,
    ) -> NDArray[np.float32] | None:
        start = np.array([answer.held for answer in answers], np.int64)
        rows = np.array([answer.row for answer in answers], np.int64)
        logits = self._session.forward(tokens, start, last, rows)
        for answer, line, count in zip(answers, tokens.tolist(), taken, strict=True):
            self._rows.write(_row(answer), line[:count], answer.held)
            answer.held += count
        return logits

    def _draw(self, answers: list[Answer], logits: NDArray[np.float32] | None) -> list[Token]:
        if logits is None:
            raise AssertionError("a session gives logits when asked for them")
        params = [answer.request.sampling for answer in answers]
        made = [answer.made for answer in answers]
        x = adjusted(logits, params, [answer.tokens for answer in answers])
        faults = row_faults(x, made, params)
        if faults:
            good = [number for number in range(len(answers)) if number not in faults]
            ends = []
            for number, fault in faults.items():
                # Where the engine's own logits are fine, the request forbids every token.
                fine = np.isfinite(logits[number].max())
                error = RequestError(fault) if fine else NumericsError(fault)
                self.end(answers[number], "error")
                ends.append(
                    Token(answer=answers[number], token=None, finished="error", error=error)
                )
            return ends + self._draw([answers[number] for number in good], logits[good])
        drawn = sample(x, params, made)
        probable = token_logprobs(logits, drawn, params)
        return [
            self._drawn(answer, token, logprobs)
            for answer, token, logprobs in zip(answers, drawn.tolist(), probable, strict=True)
        ]

    def _drawn(self, answer: Answer, token: int, logprobs: TokenLogprobs | None) -> Token:
        if token in answer.request.stop:
            self.end(answer, "stop")
            return Token(answer=answer, token=None, finished="stop")
        answer.tokens.append(token)
        if answer.made == answer.limit:
            self.end(answer, "length")
        return Token(answer=answer, token=token, logprobs=logprobs, finished=answer.finished)


def _row(answer: Answer) -> int:
    if answer.row is None:
        raise AssertionError("an answer that runs has a row")
    return answer.row
