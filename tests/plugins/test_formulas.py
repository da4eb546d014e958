"""The checks of the native kernels notice mistakes: each is planted in the expected result."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.plugins.calls import ATTENTION, EXPERTS, LINEAR
from tests.plugins.formulas import BLOCK_ROWS, STREAM_ROWS, Array, Call, formula
from tests.plugins.ort_calls import run

ROOT = Path(__file__).resolve().parent.parent.parent
Mistake = Callable[[Call], Call]


def changed(name: str, change: Callable[[Array], Array]) -> Mistake:
    return lambda call: call.but(**{name: change(call.inputs[name])})


def without_last(array: Array) -> Array:
    array = array.copy()
    array[..., -1] = 0
    return array


def with_one_code_off(codes: Array) -> Array:
    codes = codes.copy()
    codes[-1, -1] ^= 1
    return codes


def rounded_to_bfloat16(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def rolled(axis: int) -> Callable[[Array], Array]:
    return lambda array: np.roll(array, 1, axis)


def with_settings(**settings: float) -> Mistake:
    return lambda call: dataclasses.replace(call, attributes={**call.attributes, **settings})


def with_another_head_for_each(call: Call) -> Call:
    """Query head i with key head i % Hkv, in place of i // G."""
    query, heads = call.inputs["query"], call.attributes["num_heads"]
    shared = call.attributes["kv_heads"]
    by_head = query.reshape(*query.shape[:2], heads // shared, shared, -1).swapaxes(2, 3)
    return call.but(query=by_head.reshape(query.shape))


def one_key_too_many(call: Call) -> Call:
    """Row 1 attends to a key of zeros behind its tokens: all later positions move by one."""
    start = call.inputs["start"] + 1
    caches = {}
    for name in ("k_cache", "v_cache"):
        caches[name] = call.inputs[name].copy()
        for row, end in enumerate(start):
            caches[name][row, :, end - 1] = 0
    return call.but(start=start, **caches)


MISTAKES: dict[str, tuple[list[Call], Mistake]] = {
    "the-scales-of-the-next-group": (
        [LINEAR["four-tokens-in-groups"], LINEAR["129-tokens"]],
        changed("scales", rolled(0)),
    ),
    "the-scales-of-the-next-column": (
        [LINEAR["one-token"], LINEAR["the-first-of-narrow-blocks"]],
        changed("scales", rolled(1)),
    ),
    "the-last-row-left-out": (
        [LINEAR["seven-tokens"], LINEAR["129-tokens"], LINEAR["one-token-in-parts"]],
        changed("x", without_last),
    ),
    "the-last-column-left-out": (
        [LINEAR["one-token"], LINEAR["tile-and-one"], LINEAR["129-tokens"]],
        changed("weight", without_last),
    ),
    "one-bit-of-one-code": (
        [LINEAR["seven-tokens"], LINEAR["tile-and-one"], LINEAR["129-tokens"]],
        changed("weight", with_one_code_off),
    ),
    "activations-in-half-the-bits": (
        [LINEAR["seven-tokens"], LINEAR["129-tokens"], LINEAR["outlier-in-blocks"]],
        changed("x", rounded_to_bfloat16),
    ),
    "scales-in-half-the-bits": (
        [LINEAR["three-tokens"], LINEAR["the-last-of-wide-blocks"]],
        changed("scales", rounded_to_bfloat16),
    ),
    "subnormal-scales-taken-for-zero": (
        [LINEAR["subnormal-scales"], LINEAR["subnormal-scales-in-blocks"]],
        changed("scales", lambda scales: np.where(abs(scales) < 2.0**-14, 0, scales)),
    ),
    "another-expert": (
        [EXPERTS["one-token"], EXPERTS["some-without-rows"]],
        changed("experts", lambda experts: experts ^ 1),
    ),
    "the-gate-of-the-other-choice": (
        [EXPERTS["one-token"], EXPERTS["more-choices-than-go-at-once"]],
        changed("gates", rolled(-1)),
    ),
    "the-second-choice-left-out": (
        [EXPERTS["the-same-twice"], EXPERTS["nine-tokens"]],
        changed("gates", without_last),
    ),
    "the-last-hidden-value-left-out": (
        [EXPERTS["one-token"], EXPERTS["all-on-one-in-blocks"], EXPERTS["wide"]],
        changed("up_weight", without_last),
    ),
    "gate-and-up-swapped": (
        [EXPERTS["one-token"], EXPERTS["all-on-one"]],
        lambda call: call.but(
            **{
                f"{name}_{kind}": call.inputs[f"{other}_{kind}"]
                for name, other in (("gate", "up"), ("up", "gate"))
                for kind in ("weight", "scales")
            }
        ),
    ),
    "the-scales-of-the-next-group-of-down": (
        [EXPERTS["three-tokens-in-groups"], EXPERTS["all-on-one-in-blocks"]],
        changed("down_scales", rolled(1)),
    ),
    "no-cap": ([ATTENTION["loud"], ATTENTION["splits"]], with_settings(cap=1e6)),
    "another-scale": ([ATTENTION["splits"]], with_settings(scale=0.301)),
    "another-head": (
        [ATTENTION["ragged-step"], ATTENTION["loud"]],
        with_another_head_for_each,
    ),
    "one-key-too-many": (
        [ATTENTION["ragged-chunk"], ATTENTION["long-chunk"], ATTENTION["ragged-step"]],
        one_key_too_many,
    ),
    "the-last-element-of-a-head-left-out": (
        [ATTENTION["splits"], ATTENTION["a-key-head-for-each"]],
        changed("value", without_last),
    ),
    "an-old-token-of-one-head-changed": (
        [ATTENTION["splits"], ATTENTION["long-chunk"]],
        lambda call: call.but(v_cache=without_last(call.inputs["v_cache"])),
    ),
}


@pytest.mark.parametrize(("calls", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_noticed(calls: list[Call], mistake: Mistake, isa: str) -> None:
    for call in calls:
        y = run(call)[0]
        assert formula(call, isa)[0].excess(y) <= 1
        assert formula(mistake(call), isa)[0].excess(y) > 1


def test_the_calls_are_those_for_the_constants_of_the_kernels() -> None:
    header = (ROOT / "plugins" / "native" / "kernels.h").read_text()
    assert f"kStreamRows = {STREAM_ROWS};" in header
    assert f"kBlockRows = {BLOCK_ROWS};" in header


def test_what_was_not_written_is_noticed(isa: str) -> None:
    call = LINEAR["tile-and-one"]
    (expected,), (y,) = formula(call, isa), run(call)
    y[-1, -1] = np.nan
    assert expected.excess(y) == np.inf


def test_a_cache_written_in_another_slot_is_noticed(isa: str) -> None:
    call = ATTENTION["ragged-chunk"]
    _, expected, _ = formula(call, isa)
    _, found, _ = run(call)
    assert expected.excess(found) == 0
    found[1, 0, -1, 0] = 0
    assert expected.excess(found) == np.inf
