"""Lowered graphs compute what the model does, hold to TensorRT's contract, and build."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from export_grok.config import GROK_1, Dtype, GrokConfig, HeadDtype
from export_grok.engines.trt.contract import faults
from export_grok.engines.trt.lower import lower_template
from export_grok.engines.trt.module import flavour_of
from export_grok.engines.trt.plan import plan_from_graph
from export_grok.engines.trt.record import PHASES, Phase, Sizes
from export_grok.errors import BuildError
from export_grok.export.contract import GRAPH_KINDS, GraphKind
from export_grok.export.load import layer_from_index, tensor_from_array
from export_grok.export.model import Head
from export_grok.plugins.op import DOMAIN
from export_grok.weights import NUMPY_DTYPES
from tests.bundles import traced
from tests.conftest import FIXTURES, Golden, ModelOf, load_golden
from tests.engines.trt.lowered import (
    FEW,
    MANY,
    Array,
    Arrays,
    Chain,
    Lowered,
    content,
    largest,
    lowered,
    normal,
    run,
    run_changed,
    stored,
    weights,
)
from tests.parity import BFLOAT16_MEAN

# From the model in PyTorch: 1.1e-5 is reached.
TOLERANCE = 1e-4
# Through all layers, from the original program: 6.2e-5 is reached.
GOLDEN_TOLERANCE = 3e-4

# Every way that a layer is lowered: phase, and batch or chunk.
WAYS: list[tuple[Phase, int]] = [
    *(("decode", batch) for batch in (1, 3, FEW, MANY)),
    *(("prefill", chunk) for chunk in (1, 7, FEW, MANY)),
]
LENGTH = 40

HEADS: tuple[GraphKind, ...] = ("head", "head_all")


def graph_of(
    config: GrokConfig, kind: GraphKind, phase: Phase, rows: int, dtype: Dtype = "float32"
) -> Lowered:
    """Return which graph has so many rows: of a batch, or of a chunk."""
    sizes = (
        Sizes(batch=rows, chunk=7, max_length=LENGTH)
        if phase == "decode"
        else Sizes(chunk=rows, max_length=LENGTH)
    )
    return Lowered(config=config, kind=kind, phase=phase, sizes=sizes, dtype=dtype)


def layer_inputs(graph: Lowered, start: Array) -> Arrays:
    """Return inputs of a layer whose caches hold no number where nothing was written yet."""
    config, (batch, tokens) = graph.config, graph.sizes.rows(graph.phase)
    shape = (batch, config.num_kv_heads, graph.sizes.slots, config.key_size)
    keys, values = normal(2, *shape).astype(NUMPY_DTYPES[graph.dtype])
    for row, first in enumerate(start):
        keys[row, :, first:] = values[row, :, first:] = np.nan
    h = normal(batch, tokens, config.emb_size).astype(keys.dtype)
    return {"h": h, "start": start, "k_cache": keys, "v_cache": values}


def starts(graph: Lowered) -> list[Array]:
    """Return where rows may start, mixed within a batch: at both ends of the cache and between."""
    batch, tokens = graph.sizes.rows(graph.phase)
    end = graph.sizes.slots - tokens
    mixed = np.linspace(end, 0, max(batch, 3)).astype(np.int64)
    return [mixed] if batch >= 3 else [mixed[at : at + 1] for at in range(3)]


def expected_layer(golden: Golden, layer: int, inputs: Arrays) -> Arrays:
    """Return what the model computes; its caches are clean."""
    module = layer_from_index(golden.config, golden.index, layer)
    tensors = [tensor_from_array(np.nan_to_num(array)) for array in inputs.values()]
    h, k_cache, v_cache = (tensor.float().numpy() for tensor in module(*tensors))
    return {"h_out": h, "k_out": k_cache, "v_out": v_cache}


def written(graph: Lowered, start: Array) -> NDArray[np.bool_]:
    """Return which slots of the cache a run writes, [B, 1, T, 1]."""
    _, tokens = graph.sizes.rows(graph.phase)
    slot = np.arange(graph.sizes.slots)
    found: NDArray[np.bool_] = (slot >= start[:, None]) & (slot < start[:, None] + tokens)
    return found[:, None, :, None]


# ---- what a graph computes


@pytest.mark.parametrize(("phase", "rows"), WAYS)
def test_a_layer_computes_what_the_model_does(golden: Golden, phase: Phase, rows: int) -> None:
    graph = graph_of(golden.config, "layer", phase, rows)
    layer = golden.config.num_layers - 1
    bound = weights(graph, stored(golden.name), 0, layer)
    for start in starts(graph):
        inputs = layer_inputs(graph, start)
        (found,) = run(graph, [{**inputs, **bound}])
        expected = expected_layer(golden, layer, inputs)
        assert largest(found["h_out"], expected["h_out"]) < TOLERANCE
        new = written(graph, start)
        for name in ("k", "v"):
            after, before = found[f"{name}_out"], inputs[f"{name}_cache"]
            assert largest(np.where(new, after, 0), np.where(new, expected[f"{name}_out"], 0)) < (
                TOLERANCE
            )
            np.testing.assert_array_equal(np.where(new, 0, after), np.where(new, 0, before))


@pytest.mark.parametrize(("phase", "rows"), WAYS)
def test_a_cache_holds_the_rows_computed_for_it_bit_for_bit(phase: Phase, rows: int) -> None:
    golden = load_golden("tiny8")
    graph = graph_of(golden.config, "layer", phase, rows)
    for start in starts(graph):
        inputs = layer_inputs(graph, start)
        (found,) = run(graph, [{**inputs, **weights(graph, stored("tiny8"), 0)}])
        for name in ("k", "v"):
            expected = inputs[f"{name}_cache"].copy()
            computed = found[f"{name}_rows"]
            for row, first in enumerate(start):
                expected[row, :, first : first + computed.shape[2]] = computed[row]
            np.testing.assert_array_equal(found[f"{name}_out"], expected)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rows", [3, MANY])
def test_an_embedding_is_the_models_bit_for_bit(
    golden: Golden, model_of: ModelOf, phase: Phase, rows: int
) -> None:
    graph = graph_of(golden.config, "embedding", phase, rows)
    vocabulary = golden.config.vocab_size
    tokens = np.arange(rows).reshape(graph.sizes.rows(phase)) * 7919 % vocabulary
    (found,) = run(graph, [{"tokens": tokens, **weights(graph, stored(golden.name), 0)}])
    embedded = model_of(golden.name, "float32").embedding(torch.from_numpy(tokens))
    np.testing.assert_array_equal(found["h"], embedded.numpy())


@pytest.mark.parametrize(
    ("name", "head"), [*((name, "float32") for name in FIXTURES), ("tiny8", "int8")]
)
@pytest.mark.parametrize(("phase", "rows"), WAYS)
def test_a_head_computes_what_the_model_does(
    name: str, model_of: ModelOf, phase: Phase, rows: int, head: HeadDtype
) -> None:
    golden = load_golden(name)
    module = model_of(golden.name, "float32").head
    if head == "int8":
        module = int8_head(golden)
    for kind in HEADS:
        graph = dataclasses.replace(graph_of(golden.config, kind, phase, rows), head=head)
        batch, tokens = graph.sizes.rows(phase)
        h = normal(batch, tokens, golden.config.emb_size)
        expected = module(torch.from_numpy(h)).numpy()
        feeds = {"h": h, **weights(graph, stored(golden.name), 0)}
        if kind == "head_all":
            (found,) = run(graph, [feeds])
            assert largest(found["logits"], expected) < TOLERANCE
        else:
            last = np.arange(batch) * 7 % tokens
            (found,) = run(graph, [{**feeds, "last": last}])
            assert largest(found["logits"], expected[np.arange(batch), last]) < TOLERANCE


def int8_head(golden: Golden) -> Head:
    names = ("unembedding.weight", "unembedding.scales", "final_norm.scale")
    module = Head(golden.config, "float32", None)
    arrays = stored(golden.name)
    module.load_state_dict({name: tensor_from_array(arrays[name]) for name in names})
    return module


@pytest.mark.parametrize(("phase", "rows"), [("decode", 3), ("prefill", 7), ("prefill", MANY)])
def test_a_float16_layer_is_near_the_models(phase: Phase, rows: int) -> None:
    golden = load_golden("tiny8")
    graph = graph_of(golden.config, "layer", phase, rows, "float16")
    start = starts(graph)[-1]
    inputs = layer_inputs(graph, start)
    (found,) = run(graph, [{**inputs, **weights(graph, stored("tiny8"), 0, 1)}])
    expected = expected_layer(golden, 1, inputs)
    assert {array.dtype for array in found.values()} == {np.dtype(np.float16)}
    new = written(graph, start)
    for name, array in expected.items():
        of_the_run = True if name == "h_out" else new
        zeros = [np.where(of_the_run, value, 0) for value in (found[name], array)]
        assert largest(*zeros) < 2**-6


def bfloat16_steps(golden: Golden, chunk: int) -> Iterator[tuple[Array, Array, Array]]:
    """Yield what each layer makes of the original's prompt: lowered, originally, exactly."""
    config, hidden = golden.config, golden.arrays["bf16/hidden"]
    rows, _, length, _ = hidden.shape
    graph = graph_of(config, "layer", "prefill", max(chunk, length), "bfloat16")
    shape = (rows, config.num_kv_heads, graph.sizes.slots, config.key_size)
    start, empty = np.zeros(1, np.int64), np.zeros(shape, NUMPY_DTYPES["bfloat16"])
    for layer in range(config.num_layers):
        bound = weights(graph, stored(golden.name), 0, layer)
        found = []
        for row in hidden[:, layer]:
            h = np.pad(row, ((0, graph.sizes.chunk - length), (0, 0)))[None]
            inputs = {"h": h.astype(empty.dtype), "start": start}
            caches = {"k_cache": empty[:1], "v_cache": empty[:1]}
            (outputs,) = run(graph, [{**inputs, **caches, **bound}])
            found.append(outputs["h_out"][0, :length])
        module = layer_from_index(config, golden.index, layer)
        start_of_rows, *clean = torch.zeros(rows).long(), torch.zeros(shape), torch.zeros(shape)
        exact = module(torch.from_numpy(hidden[:, layer]), start_of_rows, *clean)
        yield np.stack(found), hidden[:, layer + 1], exact[0].numpy()


def usual(found: Array, expected: Array) -> float:
    """Return the mean difference of a usual token: one at a tie may choose another expert."""
    distances = np.abs(found.astype(np.float64) - expected).mean(axis=-1)
    return float(np.median(distances))


def test_many_rows_of_bfloat16_are_rounded_where_the_original_rounds() -> None:
    """All but the experts' last matrix; 0.0015 is reached, and by few rows 0.006 to 0.012."""
    for found, original, _ in bfloat16_steps(load_golden("tiny8"), MANY):
        assert usual(found, original) < 2**-8


def test_few_rows_of_bfloat16_are_nearer_to_the_exact_layer_than_the_original(
    golden: Golden,
) -> None:
    """Their matrices are not rounded, so they are off from the original by what it rounds."""
    for found, original, exact in bfloat16_steps(golden, 1):
        assert usual(found, exact) < usual(original, exact)
        assert usual(found, original) < BFLOAT16_MEAN


@pytest.mark.parametrize("rows", [7, MANY])
def test_what_an_expert_makes_of_tokens_that_did_not_choose_it_does_not_count(rows: int) -> None:
    golden = load_golden("tiny8")
    graph = graph_of(golden.config, "layer", "prefill", rows)
    inputs = layer_inputs(graph, np.array([0]))
    bound = weights(graph, stored("tiny8"), 0)
    scales = bound["experts.up.scales"] = bound["experts.up.scales"].copy()
    scales[3] = np.inf
    module = layer_from_index(golden.config, golden.index, 0)
    module.experts.up.scales = tensor_from_array(scales)
    h, *_ = module(*(tensor_from_array(np.nan_to_num(array)) for array in inputs.values()))
    (found,) = run(graph, [{**inputs, **bound}])
    others = np.isfinite(h.numpy()).all(-1)
    assert 0 < others.sum() < rows
    assert largest(found["h_out"][others], h.numpy()[others]) < TOLERANCE


@pytest.mark.parametrize(("phase", "rows"), WAYS)
def test_plugin_nodes_give_the_shapes_and_dtypes_that_are_said_of_them(
    phase: Phase, rows: int
) -> None:
    graph = graph_of(load_golden("tiny8").config, "layer", phase, rows)
    said = {}

    def show(model: ir.Model) -> None:
        for value in [v for node in model.graph if node.domain == DOMAIN for v in node.outputs]:
            assert value.shape is not None and value.dtype is not None
            said[value.name] = tuple(value.shape.numpy()), value.dtype.numpy()
            model.graph.outputs.append(value)

    inputs = layer_inputs(graph, starts(graph)[0])
    found = run_changed(graph, show, {**inputs, **weights(graph, stored("tiny8"), 0)})
    assert said
    assert {name: (found[str(name)].shape, found[str(name)].dtype) for name in said} == said


def test_the_number_of_parts_does_not_matter() -> None:
    """Fixtures are too small for several; with 3 of 216 rows, groups of scales are cut apart."""
    golden = load_golden("tiny8")
    graph = graph_of(golden.config, "layer", "decode", 3)
    parts = {"GrokInt8Product": 4, "GrokMoeDown": 3, "GrokAttentionSplit": 5}

    def cut(model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type in parts:
                node.attributes["parts"] = ir.AttrInt64("parts", parts[node.op_type])
                for value in node.outputs:
                    value.shape = None

    inputs = layer_inputs(graph, starts(graph)[0])
    found = run_changed(graph, cut, {**inputs, **weights(graph, stored("tiny8"), 0)})
    assert largest(found["h_out"], expected_layer(golden, 0, inputs)["h_out"]) < TOLERANCE


# ---- all graphs in a row


@pytest.mark.parametrize("chunk", [7, MANY])
def test_prefill_and_decode_reproduce_the_original(golden: Golden, chunk: int) -> None:
    arrays, tokens = golden.arrays, golden.arrays["tokens"]
    rows, length = tokens.shape
    fed = arrays["f32/decode_tokens"].T
    chain = Chain(golden, Sizes(batch=rows, chunk=chunk, max_length=length + len(fed)))
    prefill = [chain.prefill(row, tokens[row]) for row in range(rows)]
    decode = [
        chain.decode(step_tokens, np.full(rows, length + step))
        for step, step_tokens in enumerate(fed)
    ]
    assert largest(np.stack(prefill), arrays["f32/prefill_logits"]) < GOLDEN_TOLERANCE
    assert largest(np.stack(decode, 1), arrays["f32/decode_logits"]) < GOLDEN_TOLERANCE
    for layer, place in ((0, "first"), (-1, "last")):
        for name in ("k", "v"):
            expected = arrays[f"f32/kv_{place}_{name}_after_decode"].swapaxes(1, 2)
            cache = chain.caches[0][layer][f"{name}_cache"]
            assert largest(cache[:, :, : expected.shape[2]], expected) < GOLDEN_TOLERANCE


def test_rows_of_different_lengths_decode_as_if_alone(golden: Golden) -> None:
    arrays = golden.arrays
    prompts = (arrays["tokens"][1], arrays["short_tokens"])
    fed = (arrays["f32/decode_tokens"][1], arrays["f32/padded_decode_tokens"])
    steps = len(fed[1])
    chain = Chain(golden, Sizes(batch=2, chunk=7, max_length=len(prompts[0]) + steps))
    logits = [chain.prefill(row, prompt)[-1] for row, prompt in enumerate(prompts)]
    assert largest(logits[0], arrays["f32/prefill_logits"][1, -1]) < GOLDEN_TOLERANCE
    assert largest(logits[1], arrays["f32/padded_logits"]) < GOLDEN_TOLERANCE
    for step in range(steps):
        start = np.array([len(prompt) + step for prompt in prompts])
        found = chain.decode(np.array([tokens[step] for tokens in fed]), start)
        assert largest(found[0], arrays["f32/decode_logits"][1, step]) < GOLDEN_TOLERANCE
        assert largest(found[1], arrays["f32/padded_decode_logits"][step]) < GOLDEN_TOLERANCE


# ---- planted mistakes


def nodes_of(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def other_attribute(op_type: str, name: str, value: float) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        (node,) = nodes_of(model, op_type)
        node.attributes[name] = ir.AttrFloat32(name, value)

    return change


def other_constant(name: str, change_of: Callable[[Array], Array]) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        value = model.graph.initializers[f"grok1.{name}"]
        assert value.const_value is not None
        value.const_value = ir.tensor(change_of(value.const_value.numpy()), name=value.name)

    return change


def hidden_from_itself(model: ir.Model) -> None:
    (node,) = nodes_of(model, "LessOrEqual")
    node.op_type = "Less"


def other_expert(model: ir.Model) -> None:
    *_, last = nodes_of(model, "GrokInt8Matrix")
    last.attributes["expert"] = ir.AttrInt64("expert", 0)


def swapped(op_type: str, first: int, second: int) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        (node,) = nodes_of(model, op_type)
        one, other = node.inputs[first], node.inputs[second]
        node.replace_input_with(first, other)
        node.replace_input_with(second, one)

    return change


PLANTED: dict[str, tuple[Phase, int, Callable[[ir.Model], None]]] = {
    "half the cap": ("decode", 3, other_attribute("GrokAttentionSplit", "cap", 15.0)),
    "another scale": ("decode", 3, other_attribute("GrokAttentionSplit", "scale", 0.3)),
    "keys for values": ("decode", 3, swapped("GrokAttentionSplit", 1, 2)),
    "gate for up": ("decode", 3, swapped("GrokMoeGateUp", 2, 4)),
    "half the cap for many": ("prefill", 7, other_constant("attention_cap", lambda cap: cap / 2)),
    "no token sees itself": ("prefill", 7, hidden_from_itself),
    "the last value is not": ("prefill", 7, other_constant("tokens_7", lambda tokens: tokens - 1)),
    "another expert": ("prefill", MANY, other_expert),
    "a weight of no expert": ("prefill", MANY, other_constant("zero_weight", lambda z: z + 0.1)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_seen(name: str) -> None:
    phase, rows, change = PLANTED[name]
    golden = load_golden("tiny8")
    graph = graph_of(golden.config, "layer", phase, rows)
    inputs = layer_inputs(graph, starts(graph)[1] if phase == "prefill" else starts(graph)[0])
    found = run_changed(graph, change, {**inputs, **weights(graph, stored("tiny8"), 0)})
    expected = expected_layer(golden, 0, inputs)
    assert largest(found["h_out"], expected["h_out"]) > 100 * TOLERANCE


# ---- what a graph is made of

EACH_PHASE = list(itertools.product(GRAPH_KINDS, PHASES))
# A trace of each takes a second, so not all dtypes are on all numbers of ranks.
SOME: list[tuple[Dtype, int]] = [("float32", 8), ("bfloat16", 1), ("float16", 8)]


def chosen(
    kind: GraphKind, phase: Phase, dtype: Dtype, ranks: int, head: HeadDtype = "float32"
) -> Lowered:
    """Return a graph of tiny8, for decode of two rows, or prefill of many."""
    sizes = Sizes(tensor_parallel=ranks, batch=2, chunk=MANY, max_length=LENGTH)
    config = load_golden("tiny8").config
    return Lowered(config=config, kind=kind, phase=phase, sizes=sizes, dtype=dtype, head=head)


@pytest.mark.parametrize(("dtype", "ranks"), SOME)
@pytest.mark.parametrize(("kind", "phase"), EACH_PHASE)
def test_a_graph_holds_to_the_contract_of_tensorrt(
    kind: GraphKind, phase: Phase, dtype: Dtype, ranks: int
) -> None:
    model = lowered(chosen(kind, phase, dtype, ranks))
    assert faults(model) == []
    onnx.checker.check_model(ir.serde.serialize_model(model), full_check=True)
    ours = [node for node in model.graph if node.domain == DOMAIN]
    assert all(node.attributes["plugin_namespace"].value == DOMAIN for node in ours)
    assert {node.domain for node in model.graph} <= {"", DOMAIN, "trt"}
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        assert all(type(axis) is int for axis in value.shape)
    assert model.graph.name == f"grok1_{kind}_{phase}"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_of_int8_holds_to_the_contract_of_tensorrt(kind: GraphKind, phase: Phase) -> None:
    model = lowered(chosen(kind, phase, "bfloat16", 1, "int8"))
    assert faults(model) == []
    onnx.checker.check_model(ir.serde.serialize_model(model), full_check=True)


@pytest.mark.parametrize(("dtype", "ranks"), SOME)
@pytest.mark.parametrize(("kind", "phase"), EACH_PHASE)
def test_lowering_gives_the_same_bytes_each_time(
    kind: GraphKind, phase: Phase, dtype: Dtype, ranks: int
) -> None:
    graph = chosen(kind, phase, dtype, ranks)
    template = traced(kind, graph.config, dtype, "float32", ranks)
    before = content(template)
    again = lower_template(template, kind, dtype, graph.sizes, phase)
    assert content(again) == content(lowered(graph))
    assert content(template) == before


@pytest.mark.parametrize(("dtype", "ranks"), SOME)
def test_a_decode_layer_is_eight_kernels_and_what_tensorrt_has(dtype: Dtype, ranks: int) -> None:
    model = lowered(chosen("layer", "decode", dtype, ranks))
    assert Counter(node.op_type for node in model.graph if node.domain) == {
        "GrokInt8Product": 4,
        "GrokAttentionSplit": 1,
        "GrokAttentionCombine": 1,
        "GrokMoeGateUp": 1,
        "GrokMoeDown": 1,
        **({"DistCollective": 2} if ranks > 1 else {}),
    }


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        (FEW, {"GrokInt8Product": 4, "GrokMoeGateUp": 1, "GrokMoeDown": 1}),
        (MANY, {"GrokInt8Matrix": 4 + 3 * 8}),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_more_rows_than_64_are_multiplied_by_tensorrt(
    phase: Phase, rows: int, kernels: dict[str, int]
) -> None:
    model = lowered(graph_of(load_golden("tiny8").config, "layer", phase, rows))
    attention = {"GrokAttentionSplit": 1, "GrokAttentionCombine": 1} if phase == "decode" else {}
    found = Counter(node.op_type for node in model.graph if node.domain == DOMAIN)
    assert found == kernels | attention


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("dtype", "ranks"), SOME)
def test_caches_come_straight_from_their_write(dtype: Dtype, ranks: int, phase: Phase) -> None:
    model = lowered(chosen("layer", phase, dtype, ranks))
    writes = nodes_of(model, "TensorScatter")
    names = [(node.inputs[0].name, node.outputs[0].name) for node in writes if node.inputs[0]]
    assert names == [("k_cache", "k_out"), ("v_cache", "v_out")]
    assert [value.name for value in model.graph.outputs] == ["h_out", "k_out", "v_out"]
    assert all(node.outputs[0] in model.graph.outputs for node in writes)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("dtype", "ranks"), SOME)
def test_the_sums_over_ranks_are_what_tensorrts_parser_takes(
    dtype: Dtype, ranks: int, phase: Phase
) -> None:
    counts: dict[GraphKind, int] = {"embedding": 1, "layer": 2, "head": 0, "head_all": 0}
    for kind, count in counts.items():
        nodes = nodes_of(lowered(chosen(kind, phase, dtype, ranks)), "DistCollective")
        assert len(nodes) == (count if ranks > 1 else 0)
        for node in nodes:
            given = {name: node.attributes[name].value for name in node.attributes}
            assert given == {
                "collective_operation": "all_reduce",
                "reduce_op": "sum",
                "root": -1,
                "group_size": 0,
                "groups": (),
                "nb_rank": ranks,
            }


@pytest.mark.parametrize(("dtype", "ranks"), SOME)
@pytest.mark.parametrize("kind", ["embedding", *HEADS])
def test_the_table_is_read_as_it_is(kind: GraphKind, dtype: Dtype, ranks: int) -> None:
    """A cast of it would write it in every step."""
    name = "weight" if kind == "embedding" else "embedding.weight"
    model = lowered(chosen(kind, "decode", dtype, ranks))
    (table,) = [value for value in model.graph.inputs if value.name == name]
    assert table.dtype is not None
    assert table.dtype.numpy() == NUMPY_DTYPES[dtype]
    assert {node.op_type for node in table.consumers()} <= {"Gather", "Gemm"}


def test_an_axis_of_no_known_length_is_named() -> None:
    config = load_golden("tiny8").config
    template = traced("embedding", config, "float32").clone()
    template.graph.inputs[0].shape = ir.Shape(["B", "Q"])
    with pytest.raises(BuildError, match=r"tokens has shape \[B,Q\].*Q"):
        lower_template(template, "embedding", "float32", Sizes(), "decode")


# ---- what TensorRT-RTX builds of it

SMS = (80, 89, 120)


def build(graph: Lowered, sm: int, folder: Path) -> None:
    """Build the plan of a graph."""
    assert faults(lowered(graph)) == []
    (folder / "graph.onnx").write_bytes(content(lowered(graph)))
    out = folder / "graph.plan"
    built = plan_from_graph(folder / "graph.onnx", out, flavour=flavour_of("trt-rtx"), sm=sm)
    assert built.bytes == out.stat().st_size > 0


@pytest.fixture
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds plans by tensorrt_rtx")


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 1), ("float16", 8)])
@pytest.mark.parametrize(("kind", "phase"), EACH_PHASE)
@pytest.mark.usefixtures("rtx")
def test_every_graph_of_a_fixture_builds(
    kind: GraphKind, phase: Phase, dtype: Dtype, ranks: int, sm: int, tmp_path: Path
) -> None:
    build(chosen(kind, phase, dtype, ranks), sm, tmp_path)


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(("kind", "phase"), EACH_PHASE)
@pytest.mark.usefixtures("rtx")
def test_every_graph_of_full_size_builds(
    kind: GraphKind, phase: Phase, ranks: int, sm: int, tmp_path: Path
) -> None:
    sizes = Sizes(tensor_parallel=ranks)
    graph = Lowered(config=GROK_1, kind=kind, phase=phase, sizes=sizes, dtype="bfloat16")
    build(graph, sm, tmp_path)


@pytest.mark.parametrize(("kind", "phase"), EACH_PHASE)
def test_no_tensor_of_full_size_has_2_to_the_31_elements(kind: GraphKind, phase: Phase) -> None:
    """The experts' three stacks of 1.6e9 elements would have, as one."""
    whole = Lowered(config=GROK_1, kind=kind, phase=phase, sizes=Sizes(batch=8), dtype="bfloat16")
    model = onnx.shape_inference.infer_shapes(ir.to_proto(lowered(whole)), data_prop=True)
    values = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    made = {name for node in model.graph.node for name in node.output}
    assert made <= {value.name for value in values}
    counts = [
        math.prod(axis.dim_value for axis in value.type.tensor_type.shape.dim) for value in values
    ]
    assert 0 < min(counts) <= max(counts) < 2**31
    assert kind != "layer" or 3 * max(counts) > 2**31
