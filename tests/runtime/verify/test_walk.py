"""Graph by graph: both are fed what the reference computed, so a fault shows in its graph only."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import Dtype
from export_grok.engines.probe import GraphName, Probe, Run
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.comparison import compared
from export_grok.runtime.verify.result import GraphResult
from export_grok.runtime.verify.steps import Step, faint, steps_of
from export_grok.runtime.verify.tolerances import Tolerances, tolerances_of
from tests.conftest import load_golden

pytest.importorskip("polygraphy", reason="extra verify is not installed")

from export_grok.runtime.verify.walk import GraphFeed, graph_names, walk

Arrays = dict[str, NDArray[Any]]
Change = Callable[[GraphName, Arrays, int], None]

GOLDEN = load_golden("tiny8")
CONFIG = GOLDEN.config
SLOTS = 15
ROWS = [
    np.random.default_rng(row).integers(0, CONFIG.vocab_size, length).tolist()
    for row, length in enumerate((13, 9, 5))
]
STEPS = steps_of(ROWS, decode=2, chunk=7, max_length=SLOTS)
NAMES = ["embedding", "layer 0", "layer 1", "layer 2", "head", "head_all"]
USUAL = tolerances_of(CONFIG)


def nothing(name: GraphName, outputs: Arrays, number: int) -> None:
    """Leave what comes out as it is."""


class Changed:
    """The reference with a change in what comes out, that tells what it was fed.

    Attributes:
        fed: by graph, the inputs of each step.
    """

    def __init__(self, change: Change = nothing, dtype: Dtype = "float32") -> None:
        self._probe = TorchProbe(CONFIG, GOLDEN.index, dtype=dtype)
        self.name, self.config = "changed", CONFIG
        self.dtype: Dtype = dtype
        self.fed: dict[str, list[Arrays]] = {}
        self._change = change

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        fed = self.fed.setdefault(str(name), [])
        with self._probe.graph(name) as right:

            def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
                fed.append({key: array.copy() for key, array in inputs.items()})
                outputs = right(inputs)
                self._change(name, outputs, len(fed) - 1)
                return outputs

            yield run


def walked(
    engine: Probe,
    reference: Probe | None = None,
    steps: tuple[Step, ...] = STEPS,
    tolerances: Tolerances = USUAL,
    **options: Any,
) -> list[tuple[GraphResult, GraphFeed, list[Arrays]]]:
    return list(
        walk(
            reference or TorchProbe(CONFIG, GOLDEN.index),
            engine,
            steps,
            tolerances,
            max_length=SLOTS,
            **options,
        )
    )


def wrong(
    results: list[tuple[GraphResult, GraphFeed, list[Arrays]]],
) -> list[tuple[str, str, str]]:
    """Return graph, step and tensor of all that failed."""
    return [
        (str(result.graph), one.step, one.tensor)
        for result, _, _ in results
        for one in result.deviations
        if not one.passed
    ]


def test_the_reference_held_to_itself_deviates_by_nothing_in_any_graph() -> None:
    done: list[int] = []
    results = walked(Changed(), advance=done.append)
    assert [str(result.graph) for result, _, _ in results] == NAMES
    assert [str(name) for name in graph_names(3)] == NAMES
    assert sum(done) == len(NAMES)
    for result, _, _ in results:
        assert {one.error for one in result.deviations} == {0}
        assert [one.step for one in result.deviations] == [
            step.name
            for step in STEPS
            for one in result.deviations[: len(result.deviations) // len(STEPS)]
        ]
        if result.graph.kind == "layer":
            assert result.choices == sum(len(row) for row in ROWS)
            assert result.flips == 0


@pytest.mark.parametrize("tensor", ["k_out", "heads", "attention", "moe", "h_out"])
def test_a_fault_shows_in_its_graph_and_tensor_and_nowhere_else(tensor: str) -> None:
    def change(name: GraphName, outputs: Arrays, number: int) -> None:
        if name.layer == 1:
            outputs[tensor] = outputs[tensor] * np.float32(1.01)

    found = wrong(walked(Changed(change)))
    assert {(graph, tensor) for graph, _, tensor in found} == {("layer 1", tensor)}
    assert {step for _, step, _ in found} >= {step.name for step in STEPS}


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_a_cache_that_is_wrong_in_one_step_is_right_in_the_next_for_the_reference_wrote_it(
    at: int,
) -> None:
    def change(name: GraphName, outputs: Arrays, number: int) -> None:
        if name.layer == 0 and number == at:
            outputs["v_out"] = outputs["v_out"] + np.float32(1)

    found = wrong(walked(Changed(change)))
    assert {(graph, step) for graph, step, _ in found} == {("layer 0", STEPS[at].name)}


@pytest.mark.parametrize(
    ("name", "tensor"),
    [(NAMES[0], "h"), (NAMES[4], "logits"), (NAMES[5], "logits")],
)
def test_ends_are_compared_too(name: str, tensor: str) -> None:
    def change(graph: GraphName, outputs: Arrays, number: int) -> None:
        if str(graph) == name and number == 1:
            outputs[tensor] = outputs[tensor] * np.float32(1.01)

    assert wrong(walked(Changed(change))) == [(name, STEPS[1].name, tensor)]


def test_both_are_fed_the_same_and_it_is_what_the_reference_computed() -> None:
    def spoil(name: GraphName, outputs: Arrays, number: int) -> None:
        for tensor in outputs.keys() - {"experts"}:
            outputs[tensor] = np.zeros_like(outputs[tensor])

    reference, engine = Changed(), Changed(spoil)
    results = walked(engine, reference)
    assert list(engine.fed) == list(reference.fed) == NAMES
    right = TorchProbe(CONFIG, GOLDEN.index)
    hidden: list[NDArray[Any]] = []
    for (result, feed, outputs), name in zip(results, graph_names(3), strict=True):
        ours, theirs = engine.fed[str(name)], reference.fed[str(name)]
        assert result.graph == name
        assert len(ours) == len(theirs) == len(feed.given) == len(outputs) == len(STEPS)
        assert all(
            not array.any() for out in outputs for array in out.values() if array.dtype != int
        )
        after = []
        with right.graph(name) as run:
            for number, step in enumerate(STEPS):
                for key, array in feed.given[number].items():
                    assert np.array_equal(ours[number][key], array)
                    assert np.array_equal(theirs[number][key], array)
                if name.kind == "embedding":
                    assert np.array_equal(ours[number]["tokens"], step.tokens)
                else:
                    assert np.array_equal(ours[number]["h"], hidden[number])
                if name.kind == "head":
                    assert np.array_equal(ours[number]["last"], step.last)
                found = run(ours[number])
                after.append(found.get("h", found.get("h_out")))
                if name.kind == "layer":
                    assert np.array_equal(ours[number]["start"], step.start)
                    if number + 1 < len(STEPS):
                        for cache, output in (("k_cache", "k_out"), ("v_cache", "v_out")):
                            assert np.array_equal(ours[number + 1][cache], found[output])
        if name.kind in ("embedding", "layer"):
            hidden = [array for array in after if array is not None]


def test_before_the_first_step_every_slot_of_every_cache_holds_noise_of_its_own() -> None:
    engine = Changed()
    walked(engine)
    caches = [
        engine.fed[f"layer {layer}"][0][cache]
        for layer in range(3)
        for cache in ("k_cache", "v_cache")
    ]
    for cache in caches:
        assert cache.shape == (len(ROWS), CONFIG.num_kv_heads, SLOTS, CONFIG.key_size)
        assert (np.abs(cache).max(axis=(1, 3)) > 0.1).all()
    assert len({cache.tobytes() for cache in caches}) == len(caches)


def test_an_engine_that_reads_slots_before_they_are_written_is_seen() -> None:
    class Ahead(Changed):
        """Sees one slot more than it should: its rows begin one later for all but the cache."""

        @contextmanager
        def graph(self, name: GraphName) -> Iterator[Run]:
            with super().graph(name) as right:

                def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
                    if name.kind != "layer" or inputs["start"].max() + 2 > SLOTS:
                        return right(inputs)
                    start = inputs["start"] + (inputs["h"].shape[1] == 1)
                    return right({**inputs, "start": start})

                yield run

    found = wrong(walked(Ahead()))
    assert {graph for graph, _, _ in found} == {"layer 0", "layer 1", "layer 2"}
    assert {step for _, step, _ in found} == {step.name for step in STEPS[-2:]}


@pytest.mark.parametrize("chosen", [[0], [1], [0, 2]])
def test_of_chosen_graphs_only_these_are_compared_and_none_behind_them_is_run(
    chosen: list[int],
) -> None:
    reference, engine = Changed(), Changed()
    names = [GraphName(kind="layer", layer=layer) for layer in chosen]
    results = walked(engine, reference, chosen=names)
    assert [result.graph for result, _, _ in results] == names
    assert list(engine.fed) == [str(name) for name in names]
    assert list(reference.fed) == NAMES[: chosen[-1] + 2]
    every = {str(result.graph): result for result, _, _ in walked(Changed())}
    for result, _, _ in results:
        assert result == every[str(result.graph)]


def test_a_faint_step_is_fed_with_its_gain_and_all_others_as_they_are() -> None:
    engine = Changed()
    steps = (*STEPS, faint(STEPS[0]))
    walked(engine, steps=steps)
    for name in NAMES[1:]:
        fed = engine.fed[name]
        sizes = [float(np.abs(inputs["h"]).max()) for inputs in (fed[0], fed[-1])]
        assert sizes[1] < 1e-3 * sizes[0]
    assert np.array_equal(engine.fed["embedding"][0]["tokens"], STEPS[0].tokens)
    first, last = (engine.fed["layer 0"][number]["h"] for number in (0, -1))
    assert np.array_equal(last, first * np.float32(steps[-1].gain))


# ---- other dtypes


def test_an_engine_of_another_dtype_is_fed_its_numbers_and_held_to_twice_the_floor() -> None:
    reference = Changed()
    engine, floor = Changed(dtype="bfloat16"), Changed(dtype="bfloat16")
    tolerances = tolerances_of(CONFIG, "bfloat16")
    results = walked(engine, reference, tolerances=tolerances, floor=floor)
    assert wrong(results) == []
    for name, steps in engine.fed.items():
        for number, inputs in enumerate(steps):
            for key, array in inputs.items():
                assert np.array_equal(reference.fed[name][number][key], array)
                assert np.array_equal(floor.fed[name][number][key], array)
                if array.dtype == np.float32:
                    narrow = array.astype(ml_dtypes.bfloat16).astype(np.float32)
                    assert np.array_equal(narrow, array)
    layer, _, outputs = results[1]
    inputs = engine.fed["layer 0"][0]
    with reference.graph(GraphName(kind="layer", layer=0)) as run:
        by_mean = compared(outputs[0], run(inputs), STEPS[0], inputs, tolerances, statistic="mean")
    for one, other in zip(layer.deviations, by_mean.deviations, strict=False):
        assert (one.step, one.tensor, one.error) == (STEPS[0].name, other.tensor, other.error)
    assert any(one.error > tolerances.tensors[one.tensor] for one in layer.deviations)
    assert wrong(walked(engine, reference, tolerances=tolerances)) != []


def test_beside_a_floor_a_fault_is_still_seen() -> None:
    def change(name: GraphName, outputs: Arrays, number: int) -> None:
        if name.layer == 2:
            outputs["attention"] = outputs["attention"] * np.float32(1.1)

    results = walked(
        Changed(change, "bfloat16"),
        tolerances=tolerances_of(CONFIG, "bfloat16"),
        floor=Changed(dtype="bfloat16"),
    )
    assert {(graph, tensor) for graph, _, tensor in wrong(results)} == {("layer 2", "attention")}
