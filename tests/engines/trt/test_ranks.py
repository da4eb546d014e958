"""Ranks together compute what the whole model does, each with its own part of the weights."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from export_grok.config import HeadDtype
from export_grok.engines.trt.record import PHASES, Phase, Sizes
from export_grok.export.contract import GraphKind
from export_grok.export.load import layer_from_index
from tests.conftest import ModelOf, load_golden
from tests.engines.trt.lowered import (
    MANY,
    Array,
    Arrays,
    Chain,
    Lowered,
    bindings,
    largest,
    normal,
    part,
    run,
    stored,
    weights,
)

TOLERANCE = 1e-4
GOLDEN_TOLERANCE = 3e-4

GROUPS = [("tiny", 2), *((name, ranks) for name in ("tiny8", "deep13") for ranks in (2, 4, 8))]
SOME_GROUPS = [("tiny", 2), ("tiny8", 8), ("deep13", 4)]
WAYS: list[tuple[Phase, int]] = [("decode", 3), ("prefill", 7), ("prefill", MANY)]
LENGTH = 40


def graph_of(
    name: str, kind: GraphKind, phase: Phase, rows: int, ranks: int, head: HeadDtype = "float32"
) -> Lowered:
    """Return which graph has so many rows: of a batch, or of a chunk."""
    batch, chunk = (rows, 7) if phase == "decode" else (1, rows)
    sizes = Sizes(tensor_parallel=ranks, batch=batch, chunk=chunk, max_length=LENGTH)
    config = load_golden(name).config
    return Lowered(config=config, kind=kind, phase=phase, sizes=sizes, head=head)


def layer_inputs(graph: Lowered) -> Arrays:
    """Return inputs of the whole layer; where nothing was written the caches hold no number."""
    batch, tokens = graph.sizes.rows(graph.phase)
    config, slots = graph.config, graph.sizes.slots
    start = np.linspace(3, slots - tokens, batch).astype(np.int64)
    k_cache, v_cache = normal(2, batch, config.num_kv_heads, slots, config.key_size)
    for row, first in enumerate(start):
        k_cache[row, :, first:] = v_cache[row, :, first:] = np.nan
    h = normal(batch, tokens, config.emb_size)
    return {"h": h, "start": start, "k_cache": k_cache, "v_cache": v_cache}


def on_ranks(inputs: Arrays, ranks: int) -> list[Arrays]:
    """Return the inputs of each rank: of a cache its heads, of the others all."""
    return [
        {
            name: part(array, 1 if "cache" in name else None, ranks, rank)
            for name, array in inputs.items()
        }
        for rank in range(ranks)
    ]


@functools.cache
def parts_of(graph: Lowered, name: str) -> list[Arrays]:
    """Return the weights of each rank. They are shared: copy what is to be changed."""
    return [weights(graph, stored(name), rank) for rank in range(graph.sizes.tensor_parallel)]


def outcome(graph: Lowered, inputs: Arrays, parts: list[Arrays]) -> list[Arrays]:
    ranks = graph.sizes.tensor_parallel
    feeds = zip(on_ranks(inputs, ranks), parts, strict=True)
    return run(graph, [own | bound for own, bound in feeds])


def expected_layer(name: str, inputs: Arrays) -> tuple[Array, Array, Array]:
    golden = load_golden(name)
    module = layer_from_index(golden.config, golden.index, 0)
    tensors = [torch.from_numpy(np.nan_to_num(array)) for array in inputs.values()]
    h, k_cache, v_cache = (tensor.numpy() for tensor in module(*tensors))
    return h, k_cache, v_cache


@pytest.mark.parametrize(("phase", "rows"), WAYS)
@pytest.mark.parametrize(("name", "ranks"), GROUPS)
def test_the_ranks_of_a_layer_compute_the_whole(
    name: str, ranks: int, phase: Phase, rows: int
) -> None:
    graph = graph_of(name, "layer", phase, rows, ranks)
    inputs = layer_inputs(graph)
    found = outcome(graph, inputs, parts_of(graph, name))
    h, k_cache, v_cache = expected_layer(name, inputs)
    for outputs in found:
        assert largest(outputs["h_out"], h) < TOLERANCE
    for letter, whole in (("k", k_cache), ("v", v_cache)):
        before = inputs[f"{letter}_cache"]
        after = np.concatenate([outputs[f"{letter}_out"] for outputs in found], axis=1)
        tokens = graph.sizes.rows(phase)[1]
        for row, first in enumerate(inputs["start"]):
            new = slice(first, first + tokens)
            assert largest(after[row, :, new], whole[row, :, new]) < TOLERANCE
            after[row, :, new] = before[row, :, new]
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "ranks"), SOME_GROUPS)
def test_the_ranks_embeddings_sum_to_the_whole_bit_for_bit(
    name: str, ranks: int, phase: Phase, model_of: ModelOf
) -> None:
    graph = graph_of(name, "embedding", phase, 2 * ranks, ranks)
    entries = graph.config.vocab_size // ranks
    ends = [(rank * entries, (rank + 1) * entries - 1) for rank in range(ranks)]
    tokens = np.array(ends).reshape(graph.sizes.rows(phase))
    bound = parts_of(graph, name)
    found = run(
        graph,
        [
            {"tokens": tokens, "first": np.array([rank * entries]), **bound[rank]}
            for rank in range(ranks)
        ],
    )
    whole = model_of(name, "float32").embedding(torch.from_numpy(tokens)).numpy()
    for rank, outputs in enumerate(found):
        np.testing.assert_array_equal(outputs["h"], whole)
        others = np.isin(tokens, ends[rank], invert=True)
        assert not outputs["sum_0.part"][others].any()


@pytest.mark.parametrize(("kind", "head"), [("head_all", "float32"), ("head", "int8")])
@pytest.mark.parametrize(("name", "ranks"), SOME_GROUPS)
def test_the_ranks_logits_side_by_side_are_the_whole(
    name: str, ranks: int, kind: GraphKind, head: HeadDtype
) -> None:
    for phase, rows in WAYS:
        graphs = [graph_of(name, kind, phase, rows, count, head) for count in (1, ranks)]
        batch, tokens = graphs[0].sizes.rows(phase)
        inputs: Arrays = {"h": normal(batch, tokens, graphs[0].config.emb_size)}
        if kind == "head":
            inputs["last"] = np.arange(batch) * 5 % tokens
        logits = [
            np.concatenate(
                [found["logits"] for found in outcome(graph, inputs, parts_of(graph, name))],
                axis=-1,
            )
            for graph in graphs
        ]
        assert largest(logits[1], logits[0]) < TOLERANCE


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("tiny8", 8)])
def test_ranks_reproduce_the_original(name: str, ranks: int) -> None:
    golden = load_golden(name)
    arrays, tokens = golden.arrays, golden.arrays["tokens"]
    rows, length = tokens.shape
    fed = arrays["f32/decode_tokens"].T
    sizes = Sizes(tensor_parallel=ranks, batch=rows, chunk=7, max_length=length + len(fed))
    chain = Chain(golden, sizes)
    prefill = np.stack([chain.prefill(row, tokens[row]) for row in range(rows)])
    assert largest(prefill, arrays["f32/prefill_logits"]) < GOLDEN_TOLERANCE
    for step, some in enumerate(fed):
        logits = chain.decode(some, np.full(rows, length + step))
        assert largest(logits, arrays["f32/decode_logits"][:, step]) < GOLDEN_TOLERANCE


# ---- planted mistakes

Plant = Callable[[list[Arrays], Arrays], None]


def another_group_of_scales(name: str) -> Plant:
    """Give one rank the scales of its neighbour's rows."""

    def plant(parts: list[Arrays], _whole: Arrays) -> None:
        parts[0][name] = parts[1][name]

    return plant


def one_part_twice(*names: str) -> Plant:
    """Give a rank the part of another, which then counts twice."""

    def plant(parts: list[Arrays], _whole: Arrays) -> None:
        parts[1].update({name: parts[0][name] for name in names})

    return plant


def interleaved(heads: int, *names: str) -> Plant:
    """Deal the heads out one by one, not in blocks."""

    def plant(parts: list[Arrays], whole: Arrays) -> None:
        for name in names:
            by_head = np.split(whole[name], heads, axis=-1)
            for rank, bound in enumerate(parts):
                bound[name] = np.concatenate(by_head[rank :: len(parts)], axis=-1)

    return plant


def rows_for_columns(name: str) -> Plant:
    """Cut a matrix by rows that is to be cut by columns: the shape of a square one allows it."""

    def plant(parts: list[Arrays], whole: Arrays) -> None:
        for rank, bound in enumerate(parts):
            rows = np.split(whole[name], len(parts), axis=-2)[rank]
            bound[name] = rows.reshape(bound[name].shape)

    return plant


QUERY = ("attention.query.weight", "attention.query.scales")
KEY_AND_VALUE = tuple(
    f"attention.{matrix}.{kind}" for matrix in ("key", "value") for kind in ("weight", "scales")
)
EXPERTS = tuple(
    f"experts.{matrix}.{kind}"
    for matrix in ("gate", "up", "down")
    for kind in ("weight", "scales")
)
PLANTED: dict[str, Plant] = {
    "another group of scales in attention": another_group_of_scales("attention.out.scales"),
    "another group of scales in experts": another_group_of_scales("experts.down.scales"),
    "a part of the experts twice": one_part_twice(*EXPERTS),
    "a part of the values twice": one_part_twice(*KEY_AND_VALUE[2:]),
    "query heads dealt out": interleaved(16, *QUERY),
    "key and value heads dealt out": interleaved(8, *KEY_AND_VALUE),
    "rows for columns": rows_for_columns("experts.gate.weight"),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_part_is_seen(name: str, ranks: int) -> None:
    """Where some part is wrong, so is the sum, on all ranks alike."""
    graph = graph_of("tiny8", "layer", "decode", 3, ranks)
    whole = weights(graph_of("tiny8", "layer", "decode", 3, 1), stored("tiny8"), 0)
    parts = [dict(bound) for bound in parts_of(graph, "tiny8")]
    PLANTED[name](parts, whole)
    inputs = layer_inputs(graph)
    shapes = {row.name: row.shape for row in bindings(graph)}
    assert all(array.shape == shapes[at] for bound in parts for at, array in bound.items())
    h, _, _ = expected_layer("tiny8", inputs)
    for outputs in outcome(graph, inputs, parts):
        assert largest(outputs["h_out"], h) > 100 * TOLERANCE


def test_a_wrong_first_token_is_seen(model_of: ModelOf) -> None:
    graph = graph_of("tiny8", "embedding", "decode", 3, 8)
    tokens = np.array([[0], [79], [80]])
    bound = parts_of(graph, "tiny8")
    feeds: list[dict[str, Any]] = [
        {"tokens": tokens, "first": np.array([80 * rank + 1]), **bound[rank]} for rank in range(8)
    ]
    whole = model_of("tiny8", "float32").embedding(torch.from_numpy(tokens)).numpy()
    assert largest(run(graph, feeds)[0]["h"], whole) > 100 * TOLERANCE
