"""A decode step of one to several rows, beside the bytes of the experts that they really chose."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, open_bundle
from export_grok.engines.backend import open_probe
from export_grok.engines.probe import GraphName, Probe, Run
from export_grok.runtime.bench.traffic import step_traffic
from export_grok.runtime.open import open_session
from export_grok.runtime.probe_session import open_probe_session

__all__ = ["CONTEXT", "STEPS", "Steps", "step_growth"]

CONTEXT, STEPS = 32, 8

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A decode step of so many rows.

    Attributes:
        rows: that get a token, R.
        seconds: of a step, the median of each round.
        experts: different ones that were chosen in a layer, the mean over layers and steps.
        uniform: how many that would be if all choices were equally likely.
        bytes: that a step reads, with the experts that were chosen.
        uniform_bytes: with the others.
    """

    rows: int
    seconds: tuple[float, ...]
    experts: float
    uniform: float
    bytes: float
    uniform_bytes: float


def step_growth(engine: Path, rows: Sequence[int], rounds: int) -> list[Steps]:
    """Return a step of each number of rows; they take turns, round by round.

    All rows are of one session, whose cache has 32 random tokens of each before.
    """
    bundle = open_bundle(engine, kind="engine")
    most = max(rows)
    random = np.random.default_rng(0)
    tokens = random.integers(0, bundle.config.vocab_size, (most, CONTEXT + STEPS))
    chosen = _chosen_experts(bundle, tokens)
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    with open_session(bundle, batch=most, max_length=CONTEXT + STEPS) as session:
        session.forward(tokens[:, :CONTEXT], np.zeros(most, np.int64), None)
        for number in range(rounds + 1):
            for count in rows:
                numbers = np.arange(count)
                taken = []
                for step in range(CONTEXT, CONTEXT + STEPS):
                    new = np.ascontiguousarray(tokens[:count, step : step + 1])
                    start, last = np.full(count, step), np.zeros(count, np.int64)
                    began = perf_counter()
                    session.forward(new, start, last, numbers)
                    taken.append(perf_counter() - began)
                if number:  # the first round warms up
                    seconds[count].append(statistics.median(taken))
    return [_steps(bundle, count, seconds[count], chosen[..., :count, :]) for count in rows]


def _steps(bundle: Bundle, rows: int, seconds: list[float], chosen: Ints) -> Steps:
    manifest = bundle.manifest
    traffic = step_traffic(
        bundle.config, manifest.dtype, manifest.head, batch=rows, attended=CONTEXT + STEPS / 2
    )
    counted = float(np.mean([len(np.unique(step)) for layer in chosen for step in layer]))
    one = traffic.experts / traffic.experts_per_layer
    return Steps(
        rows=rows,
        seconds=tuple(seconds),
        experts=counted,
        uniform=traffic.experts_per_layer,
        bytes=dataclasses.replace(traffic, experts=one * counted).total,
        uniform_bytes=traffic.total,
    )


def _chosen_experts(bundle: Bundle, tokens: Ints) -> Ints:
    """Return the experts that decoding behind the context chooses, [layers, steps, B, C]."""
    probe = _Recording(open_probe(bundle))
    rows, length = tokens.shape
    with open_probe_session(probe, batch=rows, max_length=length) as session:
        session.forward(tokens[:, :CONTEXT], np.zeros(rows, np.int64), None)
        probe.experts.clear()
        for step in range(CONTEXT, length):
            session.forward(tokens[:, step : step + 1], np.full(rows, step), None)
    return np.stack([np.stack(probe.experts[layer]) for layer in sorted(probe.experts)])


class _Recording:
    """A probe that keeps the experts that its layers choose.

    Attributes:
        experts: of each layer, call by call [B, C].
    """

    def __init__(self, probe: Probe) -> None:
        self.name, self.config, self.dtype = probe.name, probe.config, probe.dtype
        self.experts: dict[int, list[Ints]] = {}
        self._probe = probe

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        with self._probe.graph(name) as run:

            def recorded(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
                outputs = run(inputs)
                if name.layer is not None:
                    self.experts.setdefault(name.layer, []).append(outputs["experts"][:, -1])
                return outputs

            yield recorded
