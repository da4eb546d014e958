"""The rounds of a benchmark: each measures every setting once, the ceiling between them."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.backend import RowSession
from export_grok.runtime.bench.ceiling import Reading
from export_grok.runtime.bench.machine import pages_from_disk, process_time
from export_grok.runtime.bench.options import BenchOptions, Setting
from export_grok.runtime.bench.result import Sample
from export_grok.runtime.decode import decode
from export_grok.runtime.request import Request

__all__ = ["Rounds"]

_Call = Callable[[], Any]


@dataclass(frozen=True)
class _Work:
    """What one setting does in a round: calls that are not timed, then calls that are."""

    before: tuple[_Call, ...]
    timed: tuple[_Call, ...]

    def sample(self) -> tuple[tuple[float, ...], float, int]:
        """Return seconds of each call, processor seconds and pages from disk of all."""
        for call in self.before:
            call()
        pages, cpu = pages_from_disk(), process_time()
        marks = [perf_counter()]
        for call in self.timed:
            call()
            marks.append(perf_counter())
        cpu, pages = process_time() - cpu, pages_from_disk() - pages
        seconds = tuple(end - begin for begin, end in itertools.pairwise(marks))
        return seconds, cpu, pages


class Rounds:
    """All settings, ready to be measured as often as one likes.

    The tokens are random and fixed: the work of a setting is the same in every round.

    Args:
        sessions: for each batch. Their caches take every setting.
        settings: in the order of a round.
        options: whose `decode_tokens` and `seed` are used.
    """

    def __init__(
        self,
        sessions: Mapping[int, RowSession],
        settings: Sequence[Setting],
        options: BenchOptions,
    ) -> None:
        random = np.random.default_rng(options.seed)
        self._fill = []
        for batch, session in sessions.items():
            longest = max(setting.tokens for setting in settings if setting.batch == batch)
            self._fill.append(_prefill(session, _tokens(random, session, longest)))
        self._works = []
        for setting in settings:
            session = sessions[setting.batch]
            if setting.stage == "prefill":
                prefill = _prefill(session, _tokens(random, session, setting.tokens))
                self._works.append(_Work(before=(), timed=(prefill,)))
            else:
                tokens = _tokens(random, session, options.decode_tokens)
                steps = _steps(session, tokens, setting.tokens)
                # The reader has just taken the caches: the first step finds them so, and the
                # engine's threads asleep. It is done once more before it counts.
                self._works.append(_Work(before=steps[:1], timed=steps))

    def warm_up(self) -> None:
        """Fill the caches, from which decoding begins in every round; then do one round."""
        for fill in self._fill:
            fill()
        for work in self._works:
            work.sample()

    def run(
        self,
        rounds: int,
        read: Callable[[], Reading],
        on_round: Callable[[int], None] = lambda number: None,
    ) -> tuple[list[Reading], list[list[Sample]]]:
        """Return the readings of the ceiling, and the samples of each setting.

        Args:
            rounds: how many.
            read: measures the ceiling: before the first setting, and after each one.
            on_round: gets the number of each round before it begins, from 1.
        """
        readings = [read()]
        samples: list[list[Sample]] = [[] for _ in self._works]
        for number in range(rounds):
            on_round(number + 1)
            for work, taken in zip(self._works, samples, strict=True):
                seconds, cpu_seconds, pages = work.sample()
                readings.append(read())
                before, after = readings[-2:]
                taken.append(
                    Sample(
                        seconds=seconds,
                        cpu_seconds=cpu_seconds,
                        pages_from_disk=pages,
                        ceiling=(before.rate + after.rate) / 2,
                    )
                )
        return readings, samples


def _tokens(random: np.random.Generator, session: RowSession, count: int) -> NDArray[np.int64]:
    """Return ids [B, count]."""
    return random.integers(0, session.config.vocab_size, (session.batch, count))


def _prefill(session: RowSession, tokens: NDArray[np.int64]) -> _Call:
    """Return the call that does what `generate` does until it has the first token of each row."""
    requests = [Request(prompt=tuple(row), max_new_tokens=1) for row in tokens.tolist()]
    return lambda: next(decode(session, requests))


def _steps(session: RowSession, tokens: NDArray[np.int64], start: int) -> tuple[_Call, ...]:
    """Return a call for each token of `tokens` [B, steps], behind `start` tokens of each row."""
    rows, count = tokens.shape
    return tuple(
        functools.partial(
            session.forward,
            np.ascontiguousarray(tokens[:, step : step + 1]),
            np.full(rows, start + step, np.int64),
            np.zeros(rows, np.int64),
        )
        for step in range(count)
    )
