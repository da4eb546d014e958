"""Graph by graph: both sides are fed the reference's inputs, so that errors do not pile up."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from export_grok.config import Dtype
from export_grok.engines.probe import GraphName, Probe
from export_grok.errors import VerificationError
from export_grok.export.contract import CACHE_OF
from export_grok.runtime.verify.comparison import beside
from export_grok.runtime.verify.poly.compare import ProbeCompare
from export_grok.runtime.verify.poly.runner import ProbeRunner
from export_grok.runtime.verify.result import GraphResult
from export_grok.runtime.verify.steps import Step
from export_grok.runtime.verify.tolerances import Tolerances
from export_grok.weights import NUMPY_DTYPES

__all__ = ["GraphFeed", "graph_names", "walk"]

Arrays = dict[str, NDArray[Any]]

REFERENCE, ENGINE, FLOOR = "reference", "engine", "rounded reference"


def graph_names(layers: int) -> tuple[GraphName, ...]:
    """Return all graphs of a model in the order of computing."""
    return (
        GraphName(kind="embedding"),
        *(GraphName(kind="layer", layer=layer) for layer in range(layers)),
        GraphName(kind="head"),
        GraphName(kind="head_all"),
    )


class GraphFeed:
    """The inputs of one graph, step by step: an iterable as polygraphy's comparator takes it.

    A layer's caches go from step to step as the reference wrote them. Before the first step they
    hold noise: what reads a slot that was not written shows. Both sides get numbers of the dtype
    of the engine.

    Attributes:
        given: the inputs of each step so far.
        hidden: what the reference gave for the next graph, of each step so far.
    """

    def __init__(
        self,
        graph: GraphName,
        reference: Probe,
        steps: Sequence[Step],
        hidden: Sequence[NDArray[Any]],
        *,
        max_length: int,
        dtype: Dtype,
        outputs: Callable[[], Arrays],
    ) -> None:
        """Take what the inputs are made of.

        Args:
            graph: to feed.
            reference: tells the shapes.
            steps: in their order.
            hidden: residual stream before this graph, of each step.
            max_length: slots of the caches.
            dtype: of the engine.
            outputs: gives what the reference made of the last inputs.
        """
        self.given: list[Arrays] = []
        self.hidden: list[NDArray[Any]] = []
        self._graph = graph
        self._steps = steps
        self._before = hidden
        self._outputs = outputs
        self._dtype = NUMPY_DTYPES[dtype]
        self._caches: Arrays = {}
        if graph.kind == "layer":
            noise = np.random.default_rng(graph.layer or 0)
            config = reference.config
            shape = (len(steps[0].start), config.num_kv_heads, max_length, config.key_size)
            for name in CACHE_OF.values():
                self._caches[name] = noise.standard_normal(shape, np.float32)

    def __iter__(self) -> Iterator[Arrays]:
        for number, step in enumerate(self._steps):
            inputs: Arrays = {"tokens": step.tokens}
            if self._graph.kind != "embedding":
                inputs = {"h": self._before[number] * np.float32(step.gain)}
            if self._graph.kind == "layer":
                inputs |= {"start": step.start, **self._caches}
            if self._graph.kind == "head":
                inputs["last"] = step.last
            inputs = {name: self._rounded(array) for name, array in inputs.items()}
            self.given.append(inputs)
            yield inputs
            outputs = self._outputs()
            for hidden in ("h", "h_out"):
                if hidden in outputs:
                    self.hidden.append(outputs[hidden])
            for output, cache in CACHE_OF.items():
                if output in outputs:
                    self._caches[cache] = outputs[output]

    def _rounded(self, array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype.kind != "f" or self._dtype == np.float32:
            return array
        return array.astype(self._dtype).astype(np.float32)


def walk(
    reference: Probe,
    engine: Probe,
    steps: Sequence[Step],
    tolerances: Tolerances,
    *,
    max_length: int,
    floor: Probe | None = None,
    chosen: Collection[GraphName] | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> Iterator[tuple[GraphResult, GraphFeed, list[Arrays]]]:
    """Yield what became of each graph, with its inputs and the engine's outputs of each step.

    Args:
        reference: what is right. It runs all graphs up to the last chosen one.
        engine: what is held to it.
        steps: that both are fed.
        tolerances: that are allowed.
        max_length: slots of the caches.
        floor: for an engine that is not float32, what rounds as the original does in its dtype.
            The engine may be twice as far from the reference as this is.
        chosen: graphs to compare; all by default.
        advance: is told of every graph that is done.

    Raises:
        VerificationError: both sides of a graph give nothing in common.
    """
    names = graph_names(reference.config.num_layers)
    wanted = set(names if chosen is None else chosen)
    hidden: list[NDArray[Any]] = []
    for name in names:
        if not wanted:
            return
        left = ProbeRunner(REFERENCE, name, lambda: reference)
        feed = GraphFeed(
            name,
            reference,
            steps,
            hidden,
            max_length=max_length,
            dtype=engine.dtype,
            outputs=lambda runner=left: runner.outputs,  # type: ignore[misc]
        )
        if name in wanted:
            wanted.discard(name)
            yield _compare(name, left, engine, floor, feed, steps, tolerances)
        elif name.kind in ("embedding", "layer"):
            with left:
                for inputs in feed:
                    left.infer(inputs)
        advance(1)
        if name.kind in ("embedding", "layer"):
            hidden = feed.hidden


def _compare(
    name: GraphName,
    left: ProbeRunner,
    engine: Probe,
    floor: Probe | None,
    feed: GraphFeed,
    steps: Sequence[Step],
    tolerances: Tolerances,
) -> tuple[GraphResult, GraphFeed, list[Arrays]]:
    right = ProbeRunner(ENGINE, name, lambda: engine)
    runners = [left, right]
    if floor is not None:
        runners.append(ProbeRunner(FLOOR, name, lambda: floor))
    outputs: list[Arrays] = []
    compare = ProbeCompare(
        steps,
        feed.given.__getitem__,
        tolerances,
        statistic="largest" if floor is None else "mean",
    )

    def kept(stream: Iterable[Any]) -> Iterator[Any]:
        for results in stream:
            outputs.append(right.outputs)
            yield results

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        stream = Comparator.run(runners, data_loader=feed, streaming=True)
        Comparator.compare_accuracy(
            kept(stream),
            compare_func=compare,
            comparisons=[(0, place) for place in range(1, len(runners))],
        )
    found = compare.findings[REFERENCE, ENGINE]
    if floor is not None:
        found = beside(found, compare.findings[REFERENCE, FLOOR])
    if not any(findings.deviations for findings in found):
        raise VerificationError(
            f"nothing can be said of {name}: {engine.name} and the reference give no tensor in "
            "common; compare with --against torch"
        )
    result = GraphResult(
        graph=name,
        deviations=tuple(one for findings in found for one in findings.deviations),
        choices=sum(findings.choices for findings in found),
        flips=sum(findings.flips for findings in found),
        near_ties=sum(findings.near_ties for findings in found),
    )
    return result, feed, outputs
