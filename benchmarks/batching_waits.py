"""How long others wait while a prompt is brought, and how long it waits itself, by the chunk."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from export_grok.artifacts import open_bundle
from export_grok.engines.backend import RowSession
from export_grok.runtime import GenerationParams, load
from export_grok.runtime.handle import Handle
from export_grok.runtime.model import Model
from export_grok.runtime.observer import FinishReason, Load, Usage
from export_grok.runtime.open import open_session

__all__ = ["LONG", "PROMPT", "ROWS", "SHORT", "Wait", "waits"]

ROWS = 8
PROMPT, LONG, SHORT, BEFORE = 512, 2048, 16, 32
ONE = GenerationParams(max_new_tokens=1, ignore_eos=True)
ENDLESS = GenerationParams(ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What one size of chunk gives; a figure for each round, in seconds.

    Attributes:
        chunk: tokens of prompts that go through the layers at once.
        alone: until a prompt of 512 tokens has its first token with nothing else running.
        loaded: the same while 7 others get their answers.
        gap: longest time between two tokens of any of those meanwhile.
        chunk_alone: of one chunk, the last one of that prompt, with nothing else running.
        step_alone: of one decode step of 8 rows.
        short: until a prompt of 16 tokens has its first token, that came in the midst of one of
            2048.
    """

    chunk: int
    alone: tuple[float, ...]
    loaded: tuple[float, ...]
    gap: tuple[float, ...]
    chunk_alone: tuple[float, ...]
    step_alone: tuple[float, ...]
    short: tuple[float, ...]


def waits(engine: Path, chunks: Sequence[int], rounds: int) -> list[Wait]:
    """Return the waits of each size of chunk; they take turns, round by round."""
    bundle = open_bundle(engine, kind="engine")
    random = np.random.default_rng(0)
    length = LONG + ROWS
    names = [field.name for field in dataclasses.fields(Wait)][1:]
    found: dict[int, list[tuple[float, ...]]] = {chunk: [] for chunk in chunks}
    with ExitStack() as opened:
        session = opened.enter_context(open_session(bundle, batch=ROWS, max_length=length))
        models = {}
        for chunk in chunks:
            gaps = _Gaps()
            model = load(engine, batch=ROWS, max_length=length, chunk=chunk, observers=[gaps])
            models[chunk] = (opened.enter_context(model), gaps)
        for number in range(rounds + 1):
            for chunk, (model, gaps) in models.items():
                alone = model.submit(_prompt(model, random, PROMPT), ONE).result()
                chunk_alone, step_alone = _parts_alone(session, chunk, random)
                loaded, gap = _beside_others(model, gaps, random)
                short = _beside_a_long_one(model, random, chunk_alone)
                figures = (
                    alone.usage.first_token_seconds,
                    loaded,
                    gap,
                    chunk_alone,
                    step_alone,
                    short,
                )
                if number:  # the first round warms up
                    found[chunk].append(figures)
    return [
        Wait(chunk=chunk, **dict(zip(names, zip(*taken, strict=True), strict=True)))
        for chunk, taken in found.items()
    ]


def _beside_others(
    model: Model, gaps: "_Gaps", random: np.random.Generator
) -> tuple[float, float]:
    """Return when a prompt had its first token beside 7 answers, and the longest gap of those."""
    with _decoding(model, ROWS - 1, random):
        gaps.longest = 0.0
        usage = model.submit(_prompt(model, random, PROMPT), ONE).result().usage
        return usage.first_token_seconds, gaps.longest


def _beside_a_long_one(model: Model, random: np.random.Generator, chunk_seconds: float) -> float:
    """Return when a short prompt had its first token; it comes within some chunk of a long one."""
    long = model.submit(_prompt(model, random, LONG), ONE)
    time.sleep(chunk_seconds * random.uniform(0.5, 1.5))
    usage = model.submit(_prompt(model, random, SHORT), ONE).result().usage
    if long.done:
        raise AssertionError(f"the prompt of {LONG} tokens was done before that of {SHORT}")
    long.cancel()
    long.result()
    return usage.first_token_seconds


@contextmanager
def _decoding(model: Model, count: int, random: np.random.Generator) -> Iterator[None]:
    """Have so many answers under way while the block runs."""
    handles: list[Handle] = [
        model.submit(_prompt(model, random, BEFORE), ENDLESS) for _ in range(count)
    ]
    for handle in handles:
        for _ in itertools.islice(handle, 2):
            pass
    yield
    for handle in handles:
        handle.cancel()
    for handle in handles:
        if handle.result().finish_reason != "cancelled":
            raise AssertionError("an answer that should load the model has ended")


def _parts_alone(
    session: RowSession, chunk: int, random: np.random.Generator
) -> tuple[float, float]:
    """Return seconds of the last chunk of the prompt, and of a decode step of all rows."""
    vocabulary, one = session.config.vocab_size, np.zeros(1, np.int64)
    began = perf_counter()
    tokens = random.integers(0, vocabulary, (1, chunk))
    session.forward(tokens, one + PROMPT - chunk, one + chunk - 1, one)
    middle = perf_counter()
    tokens = random.integers(0, vocabulary, (ROWS, 1))
    session.forward(tokens, np.full(ROWS, BEFORE), np.zeros(ROWS, np.int64))
    return middle - began, perf_counter() - middle


def _prompt(model: Model, random: np.random.Generator, length: int) -> list[int]:
    tokens: list[int] = random.integers(0, model.config.vocab_size, length).tolist()
    return tokens


class _Gaps:
    """An observer of the time between two tokens of an answer.

    Attributes:
        longest: since it was set to 0.
    """

    def __init__(self) -> None:
        self.longest = 0.0

    def submitted(self, request: str, *, prompt_tokens: int) -> None: ...

    def refused(self, error: Exception) -> None: ...

    def started(self, request: str, *, waited_seconds: float, cached_tokens: int) -> None: ...

    def token(self, request: str, *, seconds: float, first: bool) -> None:
        if not first:
            self.longest = max(self.longest, seconds)

    def finished(
        self, request: str, *, reason: FinishReason, usage: Usage, error: Exception | None
    ) -> None: ...

    def stepped(self, load: Load, *, seconds: float, prefilled: int, decoded: int) -> None: ...

    def changed(self, load: Load) -> None: ...
