"""Arguments that fit no formula are refused, with the op's name and what would be right."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, RuntimeException

from export_grok.plugins.registry import spec
from tests.plugins.calls import attention_call, experts_call, linear_call
from tests.plugins.formulas import Array, Call, formula
from tests.plugins.ort_calls import run, session_for

LINEAR = linear_call(3, 40, 31, 8)
EXPERTS = experts_call(5, 40, 24, groups=(1, 1, 8))
ATTENTION = attention_call([3, 5], 2, 9)
CALLS = [LINEAR, EXPERTS, ATTENTION]


def part(call: Call, **places: Any) -> Call:
    """Return the call with parts of some inputs; what is left out lies behind them as before."""
    return call.but(**{name: call.inputs[name][place] for name, place in places.items()})


def of_experts(place: Any, *names: str) -> Call:
    both = [f"{name}_{kind}" for name in names for kind in ("weight", "scales")]
    return part(EXPERTS, **dict.fromkeys(both, place))


def numbers(name: str, call: Call, value: list[int]) -> Call:
    shape = call.inputs[name].shape
    return call.but(**{name: np.broadcast_to(np.array(value, np.int64), shape).copy()})


def turned(array: Array) -> Array:
    return np.ascontiguousarray(array.T)


REFUSED: dict[str, tuple[Call, str]] = {
    "x-narrower": (part(LINEAR, x=np.s_[:, :-1]), "as many columns as weight rows"),
    "x-of-nine-axes": (
        LINEAR.but(x=LINEAR.inputs["x"].reshape(3, *[1] * 7, 40)),
        "more than 8 axes",
    ),
    "scales-shorter": (part(LINEAR, scales=np.s_[:, :-1]), "scales must have a matrix's columns"),
    "scales-of-seven-groups": (part(LINEAR, scales=np.s_[:7]), "must divide into the groups"),
    "scales-of-no-group": (part(LINEAR, scales=np.s_[:0]), "must divide into the groups"),
    "scales-of-one-axis": (part(LINEAR, scales=0), re.escape("[.., K, N] with [.., R, N]")),
    "scales-of-int8": (
        LINEAR.but(scales=LINEAR.inputs["scales"].astype(np.int8)),
        "float32, float16 or bfloat16",
    ),
    "weight-of-no-row": (part(LINEAR, x=np.s_[:, :0], weight=np.s_[:0]), "must"),
    "weight-of-three-axes": (part(LINEAR, weight=None), re.escape("[K, N]")),
    "expert-below-0": (numbers("experts", EXPERTS, [0, -1]), "a number that is no expert's"),
    "expert-4-of-4": (numbers("experts", EXPERTS, [4, 0]), "a number that is no expert's"),
    "expert-2-to-the-62": (numbers("experts", EXPERTS, [2**62]), "a number that is no expert's"),
    "fewer-gates": (part(EXPERTS, gates=np.s_[:, :1]), "as many choices"),
    "fewer-tokens": (part(EXPERTS, gates=np.s_[:4], experts=np.s_[:4]), "the tokens of x"),
    "no-choices": (part(EXPERTS, gates=np.s_[:, :0], experts=np.s_[:, :0]), "as many choices"),
    "x-narrower-than-experts": (part(EXPERTS, x=np.s_[:, :-1]), "do not fit each other"),
    "up-narrower": (of_experts(np.s_[..., :-1], "up"), "do not fit each other"),
    "down-lower": (part(EXPERTS, down_weight=np.s_[:, :-8]), "do not fit each other"),
    "scales-of-fewer-experts": (part(EXPERTS, down_scales=np.s_[:3]), "matrices' first axes"),
    "start-beyond-the-cache": (numbers("start", ATTENTION, [3, 8]), "within the cache's slots"),
    "start-below-0": (numbers("start", ATTENTION, [-1, 1]), "within the cache's slots"),
    "start-2-to-the-63": (numbers("start", ATTENTION, [2**63 - 1]), "within the cache's slots"),
    "start-of-one-row": (part(ATTENTION, start=np.s_[:1]), "do not fit each other"),
    "other-slots-for-values": (
        part(ATTENTION, v_cache=np.s_[:, :, :-1]),
        re.escape("[B, Hkv, T, D]"),
    ),
    "query-narrower": (part(ATTENTION, query=np.s_[..., :-1]), "do not fit each other"),
    "query-of-two-axes": (part(ATTENTION, query=0), re.escape("[B, S, H*D]")),
    "queries-of-one-row": (part(ATTENTION, query=np.s_[:1]), "do not fit each other"),
    "fewer-new-keys": (
        part(ATTENTION, key=np.s_[:, :1], value=np.s_[:, :1]),
        "do not fit each other",
    ),
    "half-the-heads": (
        dataclasses.replace(ATTENTION, attributes={**ATTENTION.attributes, "num_heads": 6}),
        "do not fit each other",
    ),
    "up-of-fewer-experts": (of_experts(np.s_[:3], "up"), "experts"),
    "down-of-fewer-experts": (of_experts(np.s_[:3], "down"), "experts"),
    "experts-of-one-matrix": (of_experts(0, "gate", "up", "down"), "experts"),
    "a-matrix-of-each-of-two": (
        LINEAR.but(**{name: np.stack([LINEAR.inputs[name]] * 2) for name in ("weight", "scales")}),
        re.escape("[K, N]"),
    ),
    "experts-turned": (EXPERTS.but(experts=turned(EXPERTS.inputs["experts"])), "gates"),
}


def assert_refused(call: Call, message: str) -> None:
    inputs = {name: np.ascontiguousarray(array) for name, array in call.inputs.items()}
    with pytest.raises(InvalidArgument, match=f"{spec(call.op).op_type}: .*{message}"):
        session_for(call).run(None, inputs)


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("best_isa")
def test_arguments_that_do_not_fit_are_refused(call: Call, message: str) -> None:
    assert_refused(call, message)
    fits = next(other for other in CALLS if other.op == call.op)
    assert formula(fits)[0].excess(run(fits)[0]) <= 1, "a refusal leaves something behind"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 5}, "num_heads must be a multiple of kv_heads"),
        ({"kv_heads": 0}, "num_heads must be a multiple of kv_heads"),
        ({"kv_heads": -2}, "negative"),
        ({"scale": 1}, ""),  # a whole number
    ],
)
@pytest.mark.usefixtures("best_isa")
def test_attributes_that_do_not_fit_are_refused_before_a_run(
    settings: dict[str, float], message: str
) -> None:
    call = dataclasses.replace(ATTENTION, attributes={**ATTENTION.attributes, **settings})
    with pytest.raises(RuntimeException, match=f"GrokSoftcapAttention: .*{message}"):
        session_for(call)


@pytest.mark.usefixtures("best_isa")
def test_no_tokens_give_no_rows() -> None:
    none = np.s_[:0]
    for call in (part(LINEAR, x=none), part(EXPERTS, x=none, gates=none, experts=none)):
        (y,) = session_for(call).run(None, call.inputs)
        assert y.shape == (0, call.inputs[list(call.inputs)[-1]].shape[-1])


@pytest.mark.usefixtures("best_isa")
def test_no_new_tokens_leave_the_caches_as_they_are() -> None:
    none = np.s_[:, :0]
    call = part(ATTENTION, query=none, key=none, value=none)
    y, *caches = session_for(call).run(None, call.inputs)
    assert y.shape == (2, 0, call.inputs["query"].shape[-1])
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        np.testing.assert_array_equal(cache, call.inputs[name])
