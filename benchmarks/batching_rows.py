"""Many requests through one model: how much more it answers when several share its steps."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from export_grok.runtime import GenerationParams, load

__all__ = ["Throughput", "throughput"]

REQUESTS, NEW_TOKENS = 32, 48
PROMPTS = (8, 32)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The same requests, so many at once.

    Attributes:
        rows: requests that run at once; 1 is one by one.
        tokens_per_second: of answers, all requests together, in each round.
    """

    rows: int
    tokens_per_second: tuple[float, ...]


def throughput(engine: Path, rows: Sequence[int], rounds: int) -> list[Throughput]:
    """Return how much is answered by each number of rows; they take turns, round by round.

    Prompts are random, of 8 to 32 tokens, and no two rounds have one in common.
    """
    random = np.random.default_rng(0)
    params = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    rates: dict[int, list[float]] = {count: [] for count in rows}
    with ExitStack() as opened:
        models = {count: opened.enter_context(load(engine, batch=count)) for count in rows}
        for number in range(rounds + 1):
            for count, model in models.items():
                lengths = random.integers(PROMPTS[0], PROMPTS[1] + 1, REQUESTS)
                vocabulary = model.config.vocab_size
                prompts = [random.integers(0, vocabulary, each).tolist() for each in lengths]
                began = perf_counter()
                results = model.generate(prompts, params)
                seconds = perf_counter() - began
                if number:  # the first round warms up
                    made = sum(len(result.tokens) for result in results)
                    rates[count].append(made / seconds)
    return [
        Throughput(rows=count, tokens_per_second=tuple(found)) for count, found in rates.items()
    ]
