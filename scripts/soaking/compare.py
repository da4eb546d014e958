"""Hold an answer under load to the same answer alone, and settle where they part.

Both are computed by the same kernels, but in calls of other shapes, whose sums are rounded in
another order: logits differ in their last bits (docs/fidelity.md). That changes a token only where
the choice was open to the last bits: two logits equal but for them, or a random number that close
to the border of a token. So a token that differs is not refused at once. The logits of what both
have in common are computed alone, and shaken by many times what rounding does: if the request
would choose the other token then, the choice was open; if not, something is wrong.
"""

import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np

from export_grok.engines.backend import RowSession
from export_grok.runtime.handle import Piece, Result
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.sampling.adjust import adjusted
from export_grok.runtime.sampling.draw import sample
from export_grok.runtime.text.answer_text import AnswerText
from export_grok.runtime.text.tokenizer import Tokenizer
from scripts.soaking.cases import Turn

__all__ = ["SHAKE", "Answers", "Parted", "was_open"]

SHAKE = 1e-4
TRIES = 100


@dataclass(frozen=True)
class Parted:
    """Where an answer under load leaves the one alone.

    Attributes:
        prefix: prompt and answer before that.
        made: tokens of the answer before that.
        token: that came under load.
    """

    prefix: tuple[int, ...]
    made: int
    token: int
    params: GenerationParams


class Answers:
    """Takes answers from all clients and compares each with the one alone.

    Args:
        tokenizer: of the model.
        eos_token: id that ends an answer.

    Attributes:
        counts: of answers, by how they compare.
        parted: answers that left the one alone, to be settled.
        faults: what may not be.
        largest: difference of a logprob from the one alone, of those before answers part.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token: int) -> None:
        self.counts: Counter[str] = Counter()
        self.parted: list[Parted] = []
        self.faults: list[str] = []
        self.largest = 0.0
        self._tokenizer = tokenizer
        self._eos = eos_token
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        """Count something else."""
        with self._lock:
            self.counts[what] += 1

    def fault(self, what: str) -> None:
        """Take note of what may not be."""
        with self._lock:
            self.faults.append(what)

    def take(self, turn: Turn, result: Result, pieces: list[Piece] | None = None) -> bool:
        """Compare an answer; return whether it is the one alone, or its beginning."""
        with self._lock:
            return self._take(turn, result, pieces)

    def _take(self, turn: Turn, result: Result, pieces: list[Piece] | None) -> bool:
        alone = turn.alone
        assert alone is not None
        faults = self._faults(turn, result, pieces)
        if result.prompt_tokens != alone.prompt_tokens:
            faults.append(f"request {result.id}: another prompt was answered")
        same = _common(alone.tokens, result.tokens)
        if alone.logprobs and result.logprobs:
            pairs = zip(alone.logprobs[:same], result.logprobs[:same], strict=False)
            differences = [abs(one.logprob - other.logprob) for one, other in pairs]
            self.largest = max(self.largest, *differences, 0.0)
        if same < len(result.tokens) or self._is_short(alone, result):
            token = result.tokens[same] if same < len(result.tokens) else self._eos
            prefix = (*result.prompt_tokens, *result.tokens[:same])
            self.parted.append(Parted(prefix, same, token, turn.params))
            self.counts["parted"] += 1
            self.faults += faults
            return False
        if result.finish_reason == "cancelled":
            self.counts["cancelled, its beginning"] += 1
        elif (alone.finish_reason, alone.text) == (result.finish_reason, result.text):
            self.counts["equal"] += 1
        else:
            faults.append(
                f"request {result.id}: the same tokens end by {result.finish_reason} as "
                f"{result.text!r}, alone by {alone.finish_reason} as {alone.text!r}"
            )
        self.faults += faults
        return not faults

    @staticmethod
    def _is_short(alone: Result, result: Result) -> bool:
        return result.finish_reason != "cancelled" and len(result.tokens) < len(alone.tokens)

    def _faults(self, turn: Turn, result: Result, pieces: list[Piece] | None) -> list[str]:
        faults = []
        text = AnswerText(self._tokenizer, result.prompt_tokens, turn.params.stop)
        for token in result.tokens:
            text.push(token)
        text.finish()
        if text.text != result.text:
            faults.append(f"the text {result.text!r} is not that of the tokens, {text.text!r}")
        usage = result.usage
        if usage.new_tokens != len(result.tokens) or usage.cached_tokens >= usage.prompt_tokens:
            faults.append(f"{usage} is not of {len(result.tokens)} tokens")
        if pieces is not None:
            if "".join(piece.text for piece in pieces) != result.text:
                faults.append("the pieces do not make the text")
            if tuple(p.token for p in pieces if p.token is not None) != result.tokens:
                faults.append("the pieces are not of the tokens")
            ends = [piece.finish_reason for piece in pieces if piece.finish_reason]
            if ends != [result.finish_reason] or pieces[-1].finish_reason is None:
                faults.append(f"a stream ended by {ends}, the answer by {result.finish_reason}")
        return [f"request {result.id}: {fault}" for fault in faults]


def was_open(parted: Parted, session: RowSession) -> bool:
    """Return whether logits that differ by what rounding may do choose the token too.

    Args:
        parted: where two answers part.
        session: of the same engine, with one row.
    """
    tokens = np.array([parted.prefix], np.int64)
    zero = np.zeros(1, np.int64)
    logits = session.forward(tokens, zero, zero + tokens.shape[1] - 1)
    assert logits is not None
    random = np.random.default_rng(0)
    for _ in range(TRIES):
        noise = random.uniform(-SHAKE, SHAKE, logits.shape).astype(np.float32)
        shaken = adjusted(logits + noise, [parted.params], [parted.prefix])
        if sample(shaken, [parted.params], [parted.made])[0] == parted.token:
            return True
    return False


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many leading tokens both have."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
