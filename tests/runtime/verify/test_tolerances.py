"""What is allowed: it grows as sums of floats do, and only so; wrong tolerances are refused."""

import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_grok.config import DTYPES, GrokConfig
from export_grok.engines.probe import TAPS
from export_grok.errors import ConfigError
from export_grok.export.contract import GraphKind, ports
from export_grok.runtime.verify.tolerances import FREE_RUN, TENSORS, tolerances_of
from tests.conftest import load_golden

CONFIG = load_golden("tiny").config


def config_of(width: int, layers: int) -> GrokConfig:
    return dataclasses.replace(CONFIG, emb_size=width, num_layers=layers)


def test_every_output_and_tap_of_every_graph_has_a_tolerance() -> None:
    shown = {
        row.name
        for kind in get_args(GraphKind)
        for row in ports(kind, CONFIG, "float32")
        if row.direction == "out"
    }
    # Probabilities only say how near a tie is; gates are some of them.
    assert {*TENSORS} == shown | {*TAPS} - {"probabilities"} | {FREE_RUN}


def test_tensors_are_in_the_order_of_computing() -> None:
    order = [name for name in TENSORS if name != FREE_RUN]
    before = {
        "h": (),
        "k_out": ("h",),
        "v_out": ("h",),
        "heads": ("k_out", "v_out"),
        "attention": ("heads",),
        "experts": ("attention",),
        "gates": ("experts",),
        "moe": ("gates",),
        "h_out": ("moe", "attention"),
        "logits": ("h_out",),
    }
    assert sorted(order) == sorted(before)
    for name, needed in before.items():
        assert all(order.index(one) < order.index(name) for one in needed)


@given(width=st.integers(1, 512), layers=st.integers(1, 100), dtype=st.sampled_from(DTYPES))
def test_they_are_what_the_formula_says(width: int, layers: int, dtype: str) -> None:
    found = tolerances_of(config_of(16 * width, layers), dtype)  # type: ignore[arg-type]
    for name, number in found.tensors.items():
        depth = layers if name == FREE_RUN else 1
        sums = TENSORS[name].sums * math.sqrt(16 * width * depth) / 2**24
        assert number == pytest.approx(TENSORS[name].fixed + sums, rel=1e-12)


def test_four_times_the_width_doubles_what_sums_may_do_and_depth_is_for_the_free_run() -> None:
    narrow, wide, deep = (
        tolerances_of(config).tensors
        for config in (config_of(96, 2), config_of(384, 2), config_of(96, 8))
    )
    for name, allowance in TENSORS.items():
        assert wide[name] - allowance.fixed == pytest.approx(2 * (narrow[name] - allowance.fixed))
        growth = 2 if name == FREE_RUN else 1
        assert deep[name] - allowance.fixed == pytest.approx(
            growth * (narrow[name] - allowance.fixed)
        )


def test_float32_engines_of_the_largest_model_are_held_to_less_than_a_thousandth() -> None:
    largest = dataclasses.replace(CONFIG, emb_size=6144, num_layers=64)
    tensors = tolerances_of(largest).tensors
    assert 0 < max(tensors.values()) < 1e-3
    assert tensors["experts"] == 0


def test_a_choice_is_firm_by_more_than_gates_may_be_off_and_by_more_in_narrow_dtypes() -> None:
    ties = [tolerances_of(CONFIG, dtype).near_tie for dtype in ("float32", "float16", "bfloat16")]
    assert ties[0] == tolerances_of(CONFIG).tensors["gates"]
    assert ties == sorted(ties)
    assert ties[-1] < 0.1
    assert tolerances_of(CONFIG, given={"gates": 0.25}).near_tie == 0.25


def test_those_that_are_given_are_taken_and_no_others_change() -> None:
    usual = tolerances_of(CONFIG).tensors
    given_ones = {"moe": 0.5, "experts": 2.0, FREE_RUN: 0.0}
    found = tolerances_of(CONFIG, given=given_ones).tensors
    assert found == {**usual, **given_ones}
    assert list(found) == list(TENSORS)


# ---- refused


@pytest.mark.parametrize("number", [-1e-9, -math.inf, math.inf, math.nan])
def test_a_number_that_cannot_be_a_tolerance_is_told(number: float) -> None:
    with pytest.raises(ConfigError, match=rf"the tolerance of moe is {number}; it must be a num"):
        tolerances_of(CONFIG, given={"moe": number})


@pytest.mark.parametrize(
    ("wrong", "near"), [("h_ou", "h_out"), ("gate", "gates"), ("logit", "logits")]
)
def test_a_name_that_is_nearly_one_is_told_with_the_one_that_is_meant(
    wrong: str, near: str
) -> None:
    with pytest.raises(ConfigError, match=rf"no tensor '{wrong}'; did you mean '{near}'\?"):
        tolerances_of(CONFIG, given={wrong: 1e-3})


def test_a_name_like_no_other_is_told_with_all_that_are_known() -> None:
    with pytest.raises(ConfigError) as caught:
        tolerances_of(CONFIG, given={"xyzzy": 1e-3})
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in TENSORS)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        tolerances_of(CONFIG, given={"mo": -1.0, "heads": math.nan, "h": 1e-3})
    told = str(caught.value)
    assert all(part in told for part in ("'mo'", "of mo is -1.0", "of heads is nan"))
    assert "of h is" not in told
