"""The parts of ranks are even, cover each tensor once, and belong together."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.config import GROK_1, TENSOR_PARALLEL_SIZES, GrokConfig, RankConfig
from export_grok.export.parameters import head_parameters, layer_parameters, model_parameters
from export_grok.export.partition import cut_axis, share
from export_grok.plugins.int8_linear.reference import dequantise

Array = NDArray[Any]

LAYER = "layers.0."


@st.composite
def ranks_of_models(draw: st.DrawFn) -> RankConfig:
    """Return a rank of a small model that so many ranks can share."""

    def number(most: int) -> int:
        return draw(st.integers(1, most))

    ranks = draw(st.sampled_from(TENSOR_PARALLEL_SIZES))
    groups = draw(st.sampled_from([1, ranks, 2 * ranks]))
    kv_heads = ranks * number(2)
    config = GrokConfig(
        num_layers=1,
        emb_size=number(9),
        num_q_heads=kv_heads * number(3),
        num_kv_heads=kv_heads,
        key_size=2 * number(3),
        ffn_size=math.lcm(ranks, groups) * number(3),
        vocab_size=ranks * number(9),
        num_experts=2,
        attn_output_multiplier=1,
        embedding_multiplier_scale=1,
        output_multiplier_scale=1,
        row_parallel_scale_groups=groups,
    )
    return config.for_rank(ranks)


def shapes(config: GrokConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of one layer and both heads, less the layer's prefix."""
    parameters = model_parameters(config) | head_parameters(config)
    return {name.removeprefix(LAYER): found.shape for name, found in parameters.items()}


def numbered(shape: tuple[int, ...]) -> Array:
    """Return an array in which every element is another."""
    return np.arange(math.prod(shape)).reshape(shape)


def parts(array: Array, name: str, rank: RankConfig) -> list[Array]:
    """Return the parts of all ranks, by the shape that one has."""
    axis, ranks = cut_axis(name, array.shape, rank), rank.tensor_parallel
    own = share(array.shape, axis, ranks)
    if axis is None:
        assert own == array.shape
        return [array] * ranks
    length = own[axis]
    return [
        array.take(range(number * length, (number + 1) * length), axis) for number in range(ranks)
    ]


@given(ranks_of_models())
def test_parts_are_even_and_hold_every_element_once(rank: RankConfig) -> None:
    for name, shape in shapes(rank.model).items():
        whole = numbered(shape)
        axis = cut_axis(name, shape, rank)
        found = parts(whole, name, rank)
        assert {part.shape for part in found} == {share(shape, axis, rank.tensor_parallel)}
        if axis is None:
            continue
        np.testing.assert_array_equal(np.concatenate(found, axis), whole)
        assert sum(part.size for part in found) == whole.size


@given(ranks_of_models())
def test_one_rank_has_everything(rank: RankConfig) -> None:
    alone = rank.model.for_rank(1)
    assert {cut_axis(name, shape, alone) for name, shape in shapes(rank.model).items()} == {None}


@given(ranks_of_models())
def test_what_several_ranks_hold_whole_are_norms_router_and_shared_scales(
    rank: RankConfig,
) -> None:
    assume(rank.tensor_parallel > 1)
    found = shapes(rank.model)
    whole = {name for name, shape in found.items() if cut_axis(name, shape, rank) is None}
    shared = {"attention.out.scales", "experts.down.scales"}
    assert whole == {
        "router.weight",
        "final_norm.scale",
        *(name for name in found if name.endswith("_norm.scale")),
        *(shared if rank.model.row_parallel_scale_groups == 1 else ()),
    }


@given(ranks_of_models(), st.integers(0, 2**32 - 1))
def test_the_parts_of_weight_and_scales_make_the_part_of_the_matrix(
    rank: RankConfig, seed: int
) -> None:
    """A group of scales that were cut apart from its rows would give another matrix."""
    random = np.random.default_rng(seed)
    found = shapes(rank.model)
    for name in sorted(name for name in found if name.endswith(".scales")):
        matrix = name.removesuffix(".scales")
        weight = random.integers(-128, 128, found[f"{matrix}.weight"], np.int8)
        scales = random.random(found[name], np.float32)
        whole = dequantised(weight, scales)
        for number, (own, own_scales, wanted) in enumerate(
            zip(
                parts(weight, f"{matrix}.weight", rank),
                parts(scales, name, rank),
                parts(whole, f"{matrix}.weight", rank),
                strict=True,
            )
        ):
            np.testing.assert_array_equal(
                dequantised(own, own_scales), wanted, f"{matrix} of rank {number}"
            )


def dequantised(weight: Array, scales: Array) -> Array:
    own = torch.from_numpy(np.ascontiguousarray(weight))
    own_scales = torch.from_numpy(np.ascontiguousarray(scales))
    found: Array = dequantise(own, own_scales, torch.float32).numpy()
    return found


@given(ranks_of_models())
def test_the_rows_of_a_rank_are_the_columns_that_it_computed(rank: RankConfig) -> None:
    """So nothing of another rank is needed between the two matrices."""
    config = rank.model
    for first, second, width in (
        ("attention.query", "attention.out", config.q_size),
        ("experts.gate", "experts.down", config.ffn_size),
        ("experts.up", "experts.down", config.ffn_size),
    ):
        columns, rows = np.zeros((1, width)), np.zeros((width, 1))
        columns[0], rows[:, 0] = np.arange(width), np.arange(width)
        if first.startswith("experts"):
            columns, rows = columns[None], rows[None]
        for made, taken in zip(
            parts(columns, f"{first}.weight", rank),
            parts(rows, f"{second}.weight", rank),
            strict=True,
        ):
            np.testing.assert_array_equal(made.ravel(), taken.ravel())


@given(ranks_of_models())
def test_the_query_heads_of_a_rank_read_its_own_key_and_value_heads(rank: RankConfig) -> None:
    config = rank.model
    query_head = np.arange(config.num_q_heads).repeat(config.key_size)[None]
    kv_head = np.arange(config.num_kv_heads).repeat(config.key_size)[None]
    group = config.num_q_heads // config.num_kv_heads
    for queries, keys, values in zip(
        parts(query_head, "attention.query.weight", rank),
        parts(kv_head, "attention.key.weight", rank),
        parts(kv_head, "attention.value.weight", rank),
        strict=True,
    ):
        assert set(queries.ravel() // group) == set(keys.ravel()) == set(values.ravel())
        assert len(set(queries.ravel())) == rank.num_q_heads
        assert len(set(keys.ravel())) == rank.num_kv_heads


@pytest.mark.parametrize("ranks", TENSOR_PARALLEL_SIZES)
def test_grok_1_is_shared_evenly_by_2_4_and_8_ranks(ranks: int) -> None:
    rank = GROK_1.for_rank(ranks)
    bytes_of_rank = bytes_of_all = 0
    for name, parameter in layer_parameters(GROK_1, 0).items():
        axis = cut_axis(name.removeprefix(LAYER), parameter.shape, rank)
        itemsize = {"int8": 1, "bfloat16": 2, "float32": 4}[parameter.dtype]
        bytes_of_all += itemsize * math.prod(parameter.shape)
        bytes_of_rank += itemsize * math.prod(share(parameter.shape, axis, ranks))
    norms_and_router = 4 * (4 * 6144 + 8 * 6144)
    assert bytes_of_rank == (bytes_of_all - norms_and_router) // ranks + norms_and_router
