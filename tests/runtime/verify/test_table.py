"""Who ports a model is told what is wrong, where, by how much and where to look; else nothing."""

import dataclasses
import math
import re
from typing import Any

import pytest

from export_grok.runtime.verify.finding import finding
from export_grok.runtime.verify.result import GraphResult, Place, Verification
from export_grok.runtime.verify.table import print_verification
from export_grok.runtime.verify.wording import number, percent
from tests.runtime.verify.results import (
    broken,
    deviation,
    free_run,
    sound,
    with_deviation,
    with_graph,
)

LAYER_1 = 2  # its place among the graphs


def printed(result: Verification, capsys: pytest.CaptureFixture[str]) -> str:
    print_verification(result)
    text = capsys.readouterr().out
    assert all(len(line) <= 120 for line in text.splitlines())
    return text


def words_of(text: str) -> str:
    """Return the text with its lines joined as they were before they were filled."""
    return re.sub(r"\s+", " ", text)


def lines_of(result: Verification) -> str:
    return "\n".join(finding(result))


def test_of_a_sound_comparison_nothing_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    result = sound()
    assert finding(result) == []
    text = printed(result, capsys)
    assert text.splitlines()[-1].startswith("PASSED: ")
    assert "FAILED" not in text and ">" not in text
    for graph in result.graphs:
        assert f"\n{graph.graph} " in text
    for said in ("build/demo-engine", "PyTorch reference", "float32", "64, 51, 27", "last 8"):
        assert said in text


def test_a_failure_names_layer_tensor_step_place_and_both_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = broken(tensor="attention")
    first = result.graphs[LAYER_1].first_failed
    assert first is not None and first.place is not None
    headline, *rest = finding(result)
    assert "layer 1 " in headline and "attention" in headline and "prefill 1" in headline
    for said in ("row 1", "position 29", "channel 1187", f"{first.place.value:.6g}", "-0.7321"):
        assert said in "\n".join(rest)
    for figure in (first.error, first.tolerance, first.largest, first.mean, first.median):
        assert number(figure) in "\n".join(rest)
    text = words_of(printed(result, capsys))
    assert f"FAILED: {headline}." in text
    for line in rest:
        assert line in text


def test_the_axes_of_a_cache_are_head_and_channel_and_of_logits_the_token_id() -> None:
    cache = with_deviation(sound(), LAYER_1, deviation("k_out", "decode 1", 1e3))
    assert "row 1, position 29, head 3, channel 17" in lines_of(cache)
    logits = with_deviation(sound(), 4, deviation("logits", "decode 1", 1e3))
    assert "row 1, position 29, token id 40321" in lines_of(logits)


@pytest.mark.parametrize(
    "tensor, right, suspect, cleared",
    [
        ("k_out", "", "rotary embedding", "router"),
        ("v_out", "k_out", "value matrix", "key matrix"),
        ("heads", "k_out, v_out", "cap of the scores", "key matrix"),
        ("attention", "k_out, v_out, heads", "output matrix", "softmax"),
        ("moe", "k_out, v_out, heads, attention, experts, gates", "activation", "router"),
    ],
)
def test_what_is_right_before_clears_what_made_it(
    tensor: str, right: str, suspect: str, cleared: str
) -> None:
    told = finding(broken(tensor=tensor))
    before = [line for line in told if line.startswith("right before it: ")]
    assert before == ([f"right before it: {right}"] if right else [])
    (look,) = (line for line in told if line.startswith("look at: "))
    assert suspect in look and cleared not in look and "embedding's rows" not in look


def test_where_an_engine_shows_no_taps_all_between_is_suspected() -> None:
    result = broken(tensor="heads")
    graph = result.graphs[LAYER_1]
    kept = tuple(one for one in graph.deviations if one.tensor in ("k_out", "v_out", "h_out"))
    told = lines_of(with_graph(result, LAYER_1, dataclasses.replace(graph, deviations=kept)))
    assert "right before it: k_out, v_out" in told
    for suspect in ("softmax", "router", "experts' matrices", "residual sum"):
        assert suspect in told
    assert "key matrix" not in told


def test_the_first_wrong_step_and_the_other_wrong_graphs_are_named() -> None:
    result = sound(9)
    for layer in (3, 4, 5, 8):
        result = with_deviation(result, layer + 1, deviation("moe", "decode 2", 1e4))
    told = lines_of(result)
    assert "wrong in layer 3: moe, in 1 of 10 steps, first in decode 2" in told
    assert "wrong too: layers 4-5, 8; right: 8 other graphs" in told


def test_columns_are_named_if_errors_are_confined_to_them() -> None:
    confined = broken(columns=(128, 255))
    assert "all in the columns 128 to 255" in lines_of(confined)
    assert "columns" not in lines_of(broken())


def test_other_experts_are_counted() -> None:
    place = Place(row=0, position=20, index=(1,), value=3.0, wanted=6.0)
    wrong = deviation("experts", "prefill 2", 7.0, share=0.13, place=place)
    headline, *rest = finding(with_deviation(sound(), LAYER_1, wrong))
    assert "other experts for 7 tokens in prefill 2" in headline
    assert "choice 1: engine 3, reference 6" in rest[0]
    assert "router's matrix" in "\n".join(rest)


def test_a_slot_that_no_token_is_written_to_is_told_as_that() -> None:
    place = Place(row=2, position=17, index=(0, 5), value=0.25, wanted=0.125)
    wrong = deviation("v_out", "decode 2", 0.0, error=math.inf, tolerance=0.0, place=place)
    told = finding(with_deviation(sound(), LAYER_1, wrong))
    assert "changes a slot of v_out" in told[0]
    assert "row 2, position 17, head 0, channel 5: 0.25 after the step, 0.125 before" in told[1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_finite_number_fails_and_is_printed_as_it_is(
    value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(row=0, position=5, index=(3,), value=value, wanted=0.4)
    fields: dict[str, Any] = dict.fromkeys(("error", "largest", "mean", "median"), value)
    wrong = deviation("heads", "decode 1", 1.0, place=place, **fields)
    result = with_deviation(sound(), LAYER_1, wrong)
    assert "no finite number" in finding(result)[0]
    assert f"engine {value}, reference 0.4" in lines_of(result)
    rows = printed(result, capsys).splitlines()
    (row,) = (line for line in rows if line.startswith("layer 1 "))
    assert re.search(rf"heads +{value} +4e-05 +inf +#+>", row)


def test_values_that_six_digits_do_not_tell_apart_get_nine() -> None:
    place = Place(row=0, position=5, index=(3,), value=1.00000012, wanted=1.0)
    wrong = deviation("moe", "decode 1", 2.0, place=place)
    told = lines_of(with_deviation(sound(), LAYER_1, wrong))
    assert "engine 1.00000012, reference 1" in told


def test_a_known_cause_is_told_with_how_well_it_agrees() -> None:
    told = finding(broken())[1]
    assert told.startswith("likely cause: The gates of the chosen experts")
    assert "gates-renormalised" in told and "0.21" in told


def test_a_run_that_fails_alone_is_looked_for_between_graphs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = dataclasses.replace(sound(), free_run=free_run(failures=("perplexity is 15",)))
    told = finding(result)
    assert "running free" in told[0] and "6 graphs" in told[0]
    assert "order of layers" in told[1]
    assert "running free: perplexity is 15" in told
    assert "FAILED" in printed(result, capsys)


def test_the_free_run_says_where_greedy_answers_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert "greedy: all 8 tokens of 3 rows are the same" in printed(sound(), capsys)
    parted = dataclasses.replace(sound(), free_run=free_run(parted=(1, 3), margin=0.0021))
    assert (
        "greedy: row 1 parts at token 3, where the reference preferred its own by 0.0021"
        in printed(parted, capsys)
    )


def test_of_many_layers_the_worst_are_shown_and_the_others_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = with_deviation(sound(64), 38, deviation("moe", "decode 2", 1.01))
    text = printed(result, capsys)
    rows = [
        line for line in text.splitlines() if re.match(r"(layer \d+|head\w*|embedding) ", line)
    ]
    assert len(rows) == 10
    assert any(row.startswith("layer 37 ") and row.count("#") == 10 for row in rows)
    assert "57 more graphs are not shown" in text
    assert [row.split()[1] for row in rows] == sorted((row.split()[1] for row in rows), key=int)


def test_what_was_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    result = sound(free_run=None, notes=("the free run was left out",))
    assert "NOTE: the free run was left out" in printed(result, capsys)
    nothing = dataclasses.replace(result, graphs=())
    assert "nothing was compared" in printed(nothing, capsys)
    empty = GraphResult(graph=result.graphs[1].graph, deviations=())
    assert "nothing compared" in printed(with_graph(result, 1, empty), capsys)


def test_markup_and_braces_in_names_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "[red]x[/red]{0}" in printed(sound(bundle="[red]x[/red]{0}"), capsys)


@pytest.mark.parametrize(
    "share, text",
    [(1.0, "100%"), (0.99999, "over 99.9%"), (0.5, "50%"), (0.0, "0.00%"), (1e-7, "under 0.01%")],
)
def test_only_all_is_100_percent(share: float, text: str) -> None:
    assert percent(share) == text
