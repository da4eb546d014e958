"""Results say what is worst, what is wrong first, and are JSON whatever numbers they hold."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_grok.engines.probe import GraphName
from export_grok.runtime.verify.result import Deviation, GraphResult, Place, failure
from tests.runtime.verify.results import (
    broken,
    deviation,
    free_run,
    sound,
    with_deviation,
    with_graph,
)

LAYER = GraphName(kind="layer", layer=1)

numbers = st.one_of(st.just(math.nan), st.just(math.inf), st.floats(0, 1e30))


def with_error(error: float, tolerance: float) -> Deviation:
    return dataclasses.replace(deviation("moe", "decode 1", 0), error=error, tolerance=tolerance)


@given(error=numbers, tolerance=st.floats(0, 1e3))
def test_what_is_more_than_the_whole_tolerance_fails_and_nothing_else(
    error: float, tolerance: float
) -> None:
    one = with_error(error, tolerance)
    assert one.passed is (error <= tolerance)
    assert not math.isnan(one.ratio)
    if tolerance > 1e-100:
        assert one.passed is (one.ratio <= 1)


@pytest.mark.parametrize(
    ("error", "tolerance", "ratio"),
    [
        (0.0, 0.0, 0.0),
        (1.0, 0.0, math.inf),
        (2.0, 0.5, 4.0),
        (0.125, 0.5, 0.25),
        (math.inf, 1e-3, math.inf),
        (math.nan, 1e-3, math.inf),
        (math.nan, 0.0, math.inf),
    ],
)
def test_a_ratio_is_of_the_tolerance(error: float, tolerance: float, ratio: float) -> None:
    assert with_error(error, tolerance).ratio == ratio


@given(errors=st.lists(numbers, min_size=1, max_size=8))
def test_no_step_is_worse_than_the_worst_whatever_stands_beside_it(errors: list[float]) -> None:
    graph = GraphResult(graph=LAYER, deviations=tuple(with_error(one, 0.5) for one in errors))
    assert graph.worst is not None
    assert all(one.ratio <= graph.worst.ratio for one in graph.deviations)
    assert graph.ratio == graph.worst.ratio
    assert graph.worst.passed is graph.passed


def test_where_nothing_was_compared_nothing_is_worst() -> None:
    graph = GraphResult(graph=LAYER, deviations=())
    assert (graph.worst, graph.ratio, graph.first_failed) == (None, 0, None)


def test_the_worst_is_by_its_own_tolerance() -> None:
    graph = GraphResult(graph=LAYER, deviations=(with_error(0.5, 1.0), with_error(0.2, 0.1)))
    assert graph.worst == with_error(0.2, 0.1)


def test_the_first_that_failed_is_the_first_that_was_computed() -> None:
    parts = {"k_out": 0.5, "heads": 2.0, "moe": 9.0}
    found = tuple(deviation(name, "decode 1", part) for name, part in parts.items())
    graph = GraphResult(graph=LAYER, deviations=found)
    assert graph.first_failed == found[1]
    assert not graph.passed
    right = dataclasses.replace(graph, deviations=found[:1])
    assert right.first_failed is None
    assert right.passed


def test_a_sound_result_passed_and_one_wrong_tensor_of_one_step_makes_it_fail() -> None:
    result = sound()
    assert result.passed
    assert result.failed is None
    assert failure(result) == ""
    wrong = with_deviation(result, 2, deviation("gates", "decode 3", 1.01))
    assert not wrong.passed
    assert wrong.failed is wrong.graphs[2]
    assert failure(wrong) == (
        "layer 1 is wrong, its gates in decode 3 by 1.0e-05 where 1.0e-05 is allowed"
    )


def test_the_free_run_alone_makes_a_result_fail() -> None:
    wrong = sound(free_run=free_run(failures=("perplexity is 9", "greedy answers part")))
    assert wrong.failed is None
    assert not wrong.passed
    assert failure(wrong) == "perplexity is 9; greedy answers part"


def test_without_a_free_run_graphs_decide() -> None:
    assert sound(free_run=None).passed
    assert failure(sound(free_run=None)) == "nothing is wrong"
    result = broken()
    assert not dataclasses.replace(result, free_run=None).passed
    assert failure(result).endswith("(The gates of the chosen experts are divided by their sum)")


# ---- JSON


def test_a_result_is_json_with_all_that_it_says() -> None:
    result = broken()
    value = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert value["passed"] is False
    assert [graph["graph"] for graph in value["graphs"]] == [
        "embedding",
        "layer 0",
        "layer 1",
        "layer 2",
        "head",
        "head_all",
    ]
    assert [graph["passed"] for graph in value["graphs"]] == [
        graph.passed for graph in result.graphs
    ]
    first = value["graphs"][2]["deviations"][0]
    assert first == json.loads(json.dumps(dataclasses.asdict(result.graphs[2].deviations[0])))
    assert value["free_run"]["passed"] is False
    assert value["free_run"]["parted"] == [1, 3]
    assert value["cause"]["fault"] == "gates-renormalised"
    assert value["rows"] == [64, 51, 27]


@given(values=st.lists(numbers, min_size=5, max_size=5))
def test_what_is_no_finite_number_is_null_in_json_wherever_it_is(values: list[float]) -> None:
    error, largest, value, kl, one = values
    place = Place(row=0, position=1, index=(2, 3), value=value, wanted=-value)
    wrong = deviation("k_out", "decode 1", 1, error=error, largest=largest, place=place)
    result = with_graph(sound(), 1, GraphResult(graph=LAYER, deviations=(wrong,)))
    run = free_run(error={"prefill 1": one}, kl_max=kl, floor=free_run(perplexity=one))
    result = dataclasses.replace(result, free_run=run)
    text = json.dumps(result.to_dict(), allow_nan=False)
    found = json.loads(text)["graphs"][1]["deviations"][0]
    pairs = [
        (found["error"], error),
        (found["largest"], largest),
        (found["place"]["value"], value),
        (found["place"]["wanted"], -value),
        (json.loads(text)["free_run"]["error"]["prefill 1"], one),
        (json.loads(text)["free_run"]["kl_max"], kl),
        (json.loads(text)["free_run"]["floor"]["perplexity"], one),
    ]
    for shown, number in pairs:
        assert shown == (number if math.isfinite(number) else None)


def test_without_free_run_and_cause_both_are_null() -> None:
    value = sound(free_run=None).to_dict()
    assert (value["free_run"], value["cause"], value["passed"]) == (None, None, True)
