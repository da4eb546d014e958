"""The kernels of the decode attention, in Triton's interpreter, held to the formula in float64.

Their results may be off by

    float32:  1e-5, where values are about 1 and logits below 30: a rounding of a logit of 30 is
              2^-20, and the result follows it by as much times a value
    T:        that, and u (|y| + sum p |v|), u = 2^-11 in float16 and 2^-8 in bfloat16: the result
              is rounded to T, and each weight is before it is multiplied. Weights below 2^-14 are
              subnormal in float16, and off by up to 2^-25 each

The interpreter cannot multiply bfloat16: those products are taken in float32 here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from export_grok.config import Dtype
from export_grok.plugins.plugin_node import PluginNode
from export_grok.plugins.registry import part
from export_grok.plugins.softcap_attention.trt_plugin import (
    COMBINE,
    PART_STEP,
    SPLIT,
    attention_parts,
    part_slots,
)
from tests.plugins.calls import attention_call
from tests.plugins.formulas import Array, Call, Doubles, formula
from tests.plugins.interpreted import call_of, interpreted

pytest.importorskip("triton")  # there is none but for Linux

UNIT = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
DTYPES: list[Dtype] = ["float32", "float16", "bfloat16"]
LENGTHS = [1, 9, 81, 729]
GUARD = 256  # elements around a tensor

Mistake = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def decode_call(lengths: list[int], slots: int, dtype: Dtype = "float32", **settings: Any) -> Call:
    """Return a call of one new token a row, the last of `lengths`, with numbers that T has."""
    call = attention_call([length - 1 for length in lengths], 1, slots, **settings)
    kind = getattr(torch, dtype)
    rounded = {
        name: torch.from_numpy(array).to(kind).float().numpy()
        for name, array in call.inputs.items()
        if name != "start"
    }
    return call.but(**rounded)


def guarded(tensor: Tensor) -> Tensor:
    """Return a copy with what no kernel may read before and behind it."""
    poison = float("nan") if tensor.is_floating_point() else 2**30
    memory = torch.full((tensor.numel() + 2 * GUARD,), poison, dtype=tensor.dtype)
    memory[GUARD:-GUARD] = tensor.flatten()
    return memory[GUARD:-GUARD].view(tensor.shape)


def split_inputs(call: Call, dtype: Dtype) -> dict[str, Tensor]:
    """Return the inputs of the first kernel: the caches have the new token."""
    _, keys, values = formula(call)
    kind = getattr(torch, dtype)
    tensors = {
        "query": torch.from_numpy(call.inputs["query"]).to(kind),
        "k_cache": torch.from_numpy(keys.value).to(kind),
        "v_cache": torch.from_numpy(values.value).to(kind),
        "start": torch.from_numpy(call.inputs["start"]),
    }
    return {name: guarded(tensor) for name, tensor in tensors.items()}


def wide(dtype: Dtype) -> dict[str, str]:
    """Return the constants that have the interpreter multiply right."""
    return {"OPERAND": "float32"} if dtype == "bfloat16" else {}


def split(
    call: Call, dtype: Dtype, parts: int | None = None, **settings: float
) -> tuple[Tensor, Tensor]:
    """Return sums and stats of the parts."""
    batch, heads, slots, _ = call.inputs["k_cache"].shape
    attributes = {
        "parts": parts or attention_parts(slots, batch, heads),
        "scale": call.attributes["scale"],
        "cap": call.attributes["cap"],
        **settings,
    }
    inputs = split_inputs(call, dtype)
    sums, stats = interpreted(SPLIT, inputs, dtype=dtype, constants=wide(dtype), **attributes)
    return sums, stats


def combine(sums: Tensor, stats: Tensor, dtype: Dtype) -> Array:
    """Return the attention from the parts."""
    inputs = {"sums": guarded(sums), "stats": guarded(stats)}
    (y,) = interpreted(COMBINE, inputs, dtype=dtype)
    assert y.dtype == getattr(torch, dtype)
    found: Array = y.float().numpy()
    return found


def attention(
    call: Call, dtype: Dtype = "float32", parts: int | None = None, **settings: float
) -> Array:
    """Return what both kernels make of a call."""
    return combine(*split(call, dtype, parts, **settings), dtype)


def bound(call: Call, y: Doubles, dtype: Dtype) -> Doubles:
    """Return how far the kernels may be from y."""
    sizes = call.but(value=abs(call.inputs["value"]), v_cache=abs(call.inputs["v_cache"]))
    weighted = formula(sizes)[0].value
    tiny = 2.0**-25 * np.nan_to_num(sizes.inputs["v_cache"], posinf=0).sum(2).max()
    off: Doubles = 1e-5 + UNIT[dtype] * (abs(y) + weighted) + tiny * (dtype == "float16")
    return off


def excess(call: Call, found: Array, dtype: Dtype = "float32") -> float:
    """Return the largest error as a part of its bound; infinite if a result is no number."""
    y = formula(call)[0].value
    error = abs(found - y) / bound(call, y, dtype)
    return float(np.nan_to_num(error, nan=np.inf).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "group", "size"),
    [(3, 1, 16), (2, 5, 24), (1, 6, 80), (1, 6, 128), (1, 20, 20)],
)
def test_a_ragged_batch_is_within_the_bound(
    kv_heads: int, group: int, size: int, dtype: Dtype
) -> None:
    """One row fills the cache; beyond the others' tokens there is NaN."""
    shape = {"kv_heads": kv_heads, "group": group, "size": size}
    call = decode_call([*LENGTHS, 743], 743, dtype, **shape)
    assert excess(call, attention(call, dtype), dtype) <= 1


@pytest.mark.parametrize("batch", range(1, 9))
def test_rows_of_any_number_do_not_meet(batch: int) -> None:
    lengths = [(*LENGTHS, 2, 16, 17, 160)[(3 * row) % 8] for row in range(batch)]
    call = decode_call(lengths, 730, group=1, size=16, seed=batch)
    assert excess(call, attention(call)) <= 1


def test_the_cache_of_the_released_model_may_be_full() -> None:
    call = decode_call([8447], 8447, "bfloat16", kv_heads=1, size=128)
    assert excess(call, attention(call, "bfloat16"), "bfloat16") <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_may_reach_the_cap(dtype: Dtype) -> None:
    call = decode_call([81, 250], 250, dtype, kv_heads=1, loudness=1e3)
    assert excess(call, attention(call, dtype), dtype) <= 1
    assert excess(call, attention(call, dtype, cap=1e6), dtype) > 1


def test_logits_may_be_far_beyond_the_cap() -> None:
    call = decode_call([9, 81], 90, loudness=1e36)
    assert excess(call, attention(call)) <= 1


@pytest.mark.parametrize("beyond", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_beyond_a_row_changes_no_bit(dtype: Dtype, beyond: float) -> None:
    zeros, others = (
        decode_call([1, 9, 17, 81], 100, dtype, beyond=value) for value in (0.0, beyond)
    )
    expected, found = (split(call, dtype) for call in (zeros, others))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_nothing_behind_the_cache_is_read_for_a_position_beyond_it() -> None:
    """Such a call is a mistake; it sees the whole cache."""
    call = decode_call([41], 41)
    inputs = split_inputs(call, "float32")
    beyond = {**inputs, "start": torch.tensor([45])}
    settings: dict[str, Any] = {"dtype": "float32", "parts": 3, "scale": 0.3, "cap": 30.0}
    for expected, found in zip(
        interpreted(SPLIT, inputs, **settings), interpreted(SPLIT, beyond, **settings), strict=True
    ):
        assert torch.equal(expected, found)


def test_any_number_of_parts_gives_the_same() -> None:
    call = decode_call([81, 250], 250, kv_heads=1, group=2, size=24)
    assert attention_parts(250, 2, 1) == 4
    whole = attention(call, parts=1)
    for parts in range(2, 17):
        np.testing.assert_allclose(attention(call, parts=parts), whole, rtol=0, atol=5e-6)


def test_each_part_has_the_sums_and_stats_of_its_slots() -> None:
    """In parts of 16 slots: the first row sees a part and one slot, the second all three parts."""
    call = decode_call([17, 41], 41, group=3, size=20)
    sums, stats = (tensor.double().numpy() for tensor in split(call, "float32", parts=3))
    _, keys, values = (found.value.astype(np.float64) for found in formula(call))
    scale, cap = call.attributes["scale"], call.attributes["cap"]
    query = call.inputs["query"].reshape(2, 2, 3, 20).astype(np.float64)
    for row, head, number in np.ndindex(2, 2, 3):
        slots = slice(16 * number, min(16 * (number + 1), (17, 41)[row]))
        place = (row, head, number)
        if slots.stop <= slots.start:
            assert not sums[place].any()
            np.testing.assert_array_equal(stats[place], [[-np.inf, 0]] * 3)
            continue
        dots = query[row, head] @ keys[row, head, slots].T
        logits = cap * np.tanh(scale * dots / cap)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        expected = np.stack([logits.max(1), weights.sum(1)], 1)
        np.testing.assert_allclose(stats[place], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            sums[place], weights @ values[row, head, slots], rtol=0, atol=1e-4
        )


def test_the_result_is_rounded_once() -> None:
    """Sums of which nothing is rounded on the way, in numbers of which T has none but one."""
    sums = torch.full((1, 1, 2, 1, 8), 1 + 2.0**-9)
    stats = torch.tensor([0.0, 1.0]).expand(1, 1, 2, 1, 2).contiguous()
    assert (combine(sums, stats, "float32") == 1 + 2.0**-9).all()
    assert (combine(sums, stats, "float16") == 1 + 2.0**-9).all()
    assert (combine(sums, stats, "bfloat16") == 1).all()


def launched_between_guards(
    node: PluginNode, inputs: dict[str, Tensor], **attributes: float
) -> list[Tensor]:
    """Return the memory around each output after a launch; it was 7 before."""
    call = call_of(node, inputs, "float32", **attributes)
    launch, shapes = node.launch(call), node.output_shapes(call)
    memories = [torch.full((int(np.prod(shape)) + 2 * GUARD,), 7.0) for shape in shapes]
    outputs = [
        memory[GUARD:-GUARD].view(shape) for memory, shape in zip(memories, shapes, strict=True)
    ]
    kernel = getattr(part(node.op, "triton_kernel"), node.kernel)
    kernel[launch.grid](*inputs.values(), *launch.scalars.values(), *outputs, **launch.constants)
    return [torch.cat([memory[:GUARD], memory[-GUARD:]]) for memory in memories]


def test_nothing_is_written_outside_the_outputs() -> None:
    call = decode_call([1, 9, 41], 41, group=5, size=20)
    inputs = split_inputs(call, "float32")
    around = launched_between_guards(SPLIT, inputs, parts=3, scale=0.3, cap=30.0)
    sums, stats = split(call, "float32", parts=3)
    around += launched_between_guards(COMBINE, {"sums": sums, "stats": stats}, to=1)
    assert len(around) == 3
    assert all((memory == 7).all() for memory in around)


# ---- planted mistakes: the bounds are narrow enough to show them


def with_start(change: Callable[[Tensor], Tensor]) -> Mistake:
    return lambda inputs: {**inputs, "start": change(inputs["start"])}


def with_another_head_for_each(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query head i with key head i % Hkv, in place of i // G."""
    query = inputs["query"]
    by_head = query.view(len(query), -1, 2, 24).transpose(1, 2)
    return {**inputs, "query": by_head.reshape(query.shape)}


MISTAKES: dict[str, Mistake] = {
    "one-slot-too-many": with_start(lambda start: start + 1),
    "one-slot-too-few": with_start(lambda start: start - 1),
    "the-positions-of-another-row": with_start(lambda start: start.flip(0)),
    "another-head-for-each": with_another_head_for_each,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_noticed(mistake: Mistake, dtype: Dtype) -> None:
    call = decode_call([9, 81], 90, dtype, beyond=0.5)
    inputs = split_inputs(call, dtype)
    for launched, wrong in ((inputs, False), (mistake(inputs), True)):
        sums, stats = interpreted(
            SPLIT, launched, dtype=dtype, constants=wide(dtype), parts=2, scale=0.3, cap=30.0
        )
        assert (excess(call, combine(sums, stats, dtype), dtype) > 1) == wrong


def test_another_cap_or_scale_is_noticed() -> None:
    call = decode_call([81, 9], 90, loudness=20.0)
    assert excess(call, attention(call)) <= 1
    assert excess(call, attention(call, cap=30.1)) > 1
    assert excess(call, attention(call, scale=0.3003)) > 1


# ---- parts


@given(slots=st.integers(1, 20_000), rows=st.integers(1, 64), kv_heads=st.integers(1, 8))
def test_parts_cover_the_cache_and_none_is_empty(slots: int, rows: int, kv_heads: int) -> None:
    parts = attention_parts(slots, rows, kv_heads)
    length = part_slots(slots, parts)
    assert parts * length >= slots > (parts - 1) * length
    assert length % PART_STEP == 0


@pytest.mark.parametrize("kv_heads", range(1, 9))
def test_one_row_of_a_long_cache_has_work_for_every_multiprocessor(kv_heads: int) -> None:
    assert attention_parts(8447, 1, kv_heads) * kv_heads >= 132
