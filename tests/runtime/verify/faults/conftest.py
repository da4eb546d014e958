"""What the tests of faults share: graphs fed what is right, by a reference and by engines."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.engines.probe import GraphName, Probe
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.comparison import compared
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.result import Deviation
from export_grok.runtime.verify.steps import Step, faint, steps_of
from export_grok.runtime.verify.tolerances import tolerances_of
from tests.bundles import BundleOf, bundle_of, traced_once
from tests.engines.ort.conftest import builtin, native
from tests.engines.ort.test_ranks import RanksOf, ranks_of

__all__ = ["RanksOf", "builtin", "bundle_of", "native", "ranks_of", "traced_once"]

Arrays = dict[str, NDArray[Any]]

# Where a model of 3 layers, 8 groups of scales and the usual multiplier is not enough.
MODELS = {"layers_in_numeric_order": "deep13", "root_of_head_size_for_multiplier": "tiny"}

SLOTS = 16


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What the graphs of a model are fed, step by step, and what the reference makes of it."""

    bundle: Bundle
    steps: tuple[Step, ...]
    inputs: dict[GraphName, list[Arrays]]
    right: dict[GraphName, list[Arrays]]

    def outputs(self, probe: Probe, name: GraphName) -> list[Arrays]:
        """Return what `probe` makes of the same inputs."""
        with probe.graph(name) as run:
            return [run(inputs) for inputs in self.inputs[name]]

    def failed(
        self,
        name: GraphName,
        found: Sequence[Arrays],
        wanted: Sequence[Arrays],
        *,
        slots: bool = True,
    ) -> list[Deviation]:
        """Return the deviations beyond their tolerances, in the order of steps and computing.

        Args:
            name: of the graph.
            found: outputs of one side.
            wanted: of the other.
            slots: whether slots that are not to be written must stay as they are.
        """
        tolerances = tolerances_of(self.bundle.config)
        return [
            deviation
            for step, inputs, left, right in zip(
                self.steps, self.inputs[name], found, wanted, strict=True
            )
            for deviation in compared(
                left, right, step, inputs if slots else {}, tolerances
            ).deviations
            if not deviation.passed
        ]


FeedOf = Callable[[str], Feed]


def graphs_of(fault: Fault, layers: int) -> list[GraphName]:
    """Return the graphs of a model that are wrong with the fault."""
    if fault.graph == "layer":
        return [GraphName(kind="layer", layer=layers // 2)]
    if fault.graph == "head":
        return [GraphName(kind="head"), GraphName(kind="head_all")]
    return [GraphName(kind="embedding")]


@pytest.fixture(scope="session")
def feed_of(bundle_of: BundleOf) -> FeedOf:
    """Return the way to what a fixture model is fed: prompts in pieces, then single tokens."""

    @functools.cache
    def feed(name: str) -> Feed:
        bundle = bundle_of(name)
        random = np.random.default_rng(0)
        rows = [random.integers(3, bundle.config.vocab_size, size).tolist() for size in (11, 8)]
        steps = steps_of(rows, decode=2, chunk=5, max_length=SLOTS)
        return _fed(bundle, (*steps, faint(steps[0])))

    return feed


def _fed(bundle: Bundle, steps: tuple[Step, ...]) -> Feed:
    """Run the reference, and keep what goes in and out of each graph."""
    config, reference = bundle.config, TorchProbe.of_bundle(bundle)
    feed = Feed(bundle=bundle, steps=steps, inputs={}, right={})

    def run(name: GraphName, inputs: list[Arrays]) -> list[Arrays]:
        feed.inputs[name] = inputs
        feed.right[name] = feed.outputs(reference, name)
        return feed.right[name]

    embedded = run(GraphName(kind="embedding"), [{"tokens": step.tokens} for step in steps])
    hidden = [outputs["h"] for outputs in embedded]
    shape = (len(steps[0].start), config.num_kv_heads, SLOTS, config.key_size)
    for layer in range(config.num_layers):
        noise = np.random.default_rng(layer)
        caches = {
            cache: noise.standard_normal(shape, np.float32) for cache in ("k_cache", "v_cache")
        }
        name = GraphName(kind="layer", layer=layer)
        feed.inputs[name], feed.right[name] = [], []
        with reference.graph(name) as module:
            for step, stream in zip(steps, hidden, strict=True):
                h = stream * np.float32(step.gain)
                feed.inputs[name].append({"h": h, "start": step.start, **caches})
                feed.right[name].append(module(feed.inputs[name][-1]))
                outputs = feed.right[name][-1]
                caches = {"k_cache": outputs["k_out"], "v_cache": outputs["v_out"]}
        hidden = [outputs["h_out"] for outputs in feed.right[name]]
    run(
        GraphName(kind="head"),
        [{"h": h, "last": step.last} for step, h in zip(steps, hidden, strict=True)],
    )
    run(GraphName(kind="head_all"), [{"h": h} for h in hidden])
    return feed
