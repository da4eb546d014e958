"""The inputs that polygraphy feeds a graph: ours, or given ones that are held to the contract."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from export_grok.errors import ConfigError, RequestError
from export_grok.runtime.verify.poly.demo_data import Reading
from export_grok.runtime.verify.poly.graph_file import GraphFile, plain_errors
from export_grok.runtime.verify.rows import batch_of
from export_grok.runtime.verify.steps import Step

__all__ = ["GivenInputs", "GraphInputs", "StepInputs"]

# Of the caches, and how many of them no token is ever written to.
SLOTS = 29
SPARE = 5

Feed = Mapping[str, NDArray[Any]]


class StepInputs(Protocol):
    """Inputs of a graph, and which of their tokens count.

    Attributes:
        file: of the graph.
    """

    file: GraphFile

    @property
    def steps(self) -> Sequence[Step]:
        """The steps in their order; of given inputs those that were fed so far."""

    def __getitem__(self, number: int) -> Feed:
        """Return the inputs of a step."""


class GraphInputs:
    """Inputs as the graph meets them in use: a data loader for polygraphy's `Comparator`.

    Rows of different length are read in pieces and then token by token, so positions, lengths and
    caches belong together from step to step. Ids are of the vocabulary, and what a layer or head
    is fed is what the demo model computes, see `runtime.verify.poly.demo_data`. Slots of the
    caches that were not written hold noise. They are the same in every run.

    Attributes:
        file: of the graph.
        steps: in their order.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        iterations: int | None = None,
        seed: int | None = None,
        weights_root: str | Path | None = None,
    ) -> None:
        """Make the inputs.

        Args:
            path: of the graph, in its bundle.
            iterations: the first so many; all by default.
            seed: of the text, and of what is drawn at random; 0 by default.
            weights_root: where the weights of the bundle are, if they were moved.

        Raises:
            PolygraphyException: the file is no graph of a bundle, a number is out of range, or
                torch is not installed.
        """
        with plain_errors():
            if (seed or 0) < 0 or (iterations is not None and iterations < 1):
                raise ConfigError(
                    f"seed is {seed}, iterations {iterations}; a seed is 0 or more, and there are "
                    "1 or more iterations"
                )
            self.file = GraphFile.at(path, weights_root=weights_root)
            self.steps, self._feeds = _made(self.file, seed or 0)
        if iterations is not None:
            self.steps, self._feeds = self.steps[:iterations], self._feeds[:iterations]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: int) -> Feed:
        return self._feeds[number]

    def __iter__(self) -> Iterator[Feed]:
        return iter(self._feeds)


class GivenInputs:
    """Inputs of another data loader, checked, with all their tokens compared.

    Attributes:
        file: of the graph.
        steps: those that were fed so far.
    """

    def __init__(
        self, path: str | Path, given: Iterable[Feed], *, weights_root: str | Path | None = None
    ) -> None:
        """Take a data loader.

        Args:
            path: of the graph, in its bundle.
            given: inputs by their names, of one iteration after the other.
            weights_root: where the weights of the bundle are, if they were moved.

        Raises:
            PolygraphyException: the file is no graph of a bundle.
        """
        with plain_errors():
            self.file = GraphFile.at(path, weights_root=weights_root)
        self.steps: list[Step] = []
        self._feeds: list[Feed] = []
        self._given = given

    def __getitem__(self, number: int) -> Feed:
        return self._feeds[number]

    def __iter__(self) -> Iterator[Feed]:
        self.steps.clear()
        self._feeds.clear()
        for number, feed in enumerate(self._given):
            with plain_errors():
                arrays = {name: np.asarray(array) for name, array in feed.items()}
                _check(self.file, arrays, number)
            self._feeds.append(arrays)
            self.steps.append(_whole_step(arrays, number))
            yield feed

    def __setattr__(self, name: str, value: Any) -> None:
        # Polygraphy tells a data loader by this attribute what inputs there are.
        if name == "input_metadata":
            with contextlib.suppress(AttributeError):
                self._given.input_metadata = value  # type: ignore[attr-defined]
        super().__setattr__(name, value)


def _made(file: GraphFile, seed: int) -> tuple[tuple[Step, ...], list[dict[str, NDArray[Any]]]]:
    config, graph = file.bundle.config, file.graph
    slots = min(SLOTS, config.sequence_len, file.bundle.sizes.get("max_length", SLOTS))
    reading = Reading(
        batch=batch_of(file.bundle),
        longest=max(1, slots - SPARE),
        slots=slots,
        seed=seed,
    )
    steps = reading.steps(config.vocab_size)
    if graph.kind == "embedding":
        return steps, [{"tokens": step.tokens} for step in steps]
    given = reading.activations(config, graph, file.bundle.manifest.dtype)
    feeds: list[dict[str, NDArray[Any]]] = [{"h": hidden} for hidden in given.hidden]
    for feed, step in zip(feeds, steps, strict=True):
        if graph.kind == "head":
            feed["last"] = step.last
        if graph.kind == "layer":
            feed["start"] = step.start
            feed["k_cache"] = _cache(given.keys, step, seed)
            feed["v_cache"] = _cache(given.values, step, seed + 1)
    return steps, feeds


def _cache(written: NDArray[np.float32], step: Step, seed: int) -> NDArray[np.float32]:
    """Return a cache [B, Hkv, T, D] as it is before a step: written so far, and noise behind."""
    noise = np.random.default_rng(seed).standard_normal(written.shape, np.float32)
    before = np.arange(written.shape[2]) < step.start[:, np.newaxis]
    cache: NDArray[np.float32] = np.where(before[:, np.newaxis, :, np.newaxis], written, noise)
    return cache


def _check(file: GraphFile, feed: Feed, number: int) -> None:
    """Hold inputs to the contract.

    Raises:
        RequestError: they are not what a graph can meet; all faults are named.
    """
    config = file.bundle.config
    faults = []
    if "tokens" in feed and not _within(feed["tokens"], 0, config.vocab_size):
        faults.append(
            f"tokens are {feed['tokens'].min()} to {feed['tokens'].max()}; ids are 0 to "
            f"{config.vocab_size - 1}"
        )
    if {"h", "start", "k_cache"} <= feed.keys():
        length, slots = feed["h"].shape[1], feed["k_cache"].shape[2]
        if not _within(feed["start"], 0, slots - length + 1):
            faults.append(
                f"start is {feed['start'].min()} to {feed['start'].max()}; with {length} new "
                f"tokens and {slots} slots in the cache it is 0 to {slots - length}"
            )
    if {"h", "last"} <= feed.keys() and not _within(feed["last"], 0, feed["h"].shape[1]):
        faults.append(
            f"last is {feed['last'].min()} to {feed['last'].max()}; of {feed['h'].shape[1]} "
            f"tokens it is 0 to {feed['h'].shape[1] - 1}"
        )
    if faults:
        raise RequestError(
            f"the inputs of iteration {number} are none of this graph: {'; '.join(faults)}. "
            "Leave the options of inputs away, and ones that belong together are made"
        )


def _within(array: NDArray[Any], first: int, end: int) -> bool:
    return bool(((array >= first) & (array < end)).all())


def _whole_step(feed: Feed, number: int) -> Step:
    """Return the step that given inputs are: no token is padding."""
    shape = feed["tokens"].shape if "tokens" in feed else feed["h"].shape[:2]
    return Step(
        name=f"iteration {number}",
        tokens=np.zeros(shape, np.int64),
        start=np.asarray(feed.get("start", np.zeros(shape[0])), np.int64),
        length=np.full(shape[0], shape[1]),
    )
