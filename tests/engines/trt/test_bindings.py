"""Everything that is bound to a graph is named, measured, and cut for the ranks."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from export_grok.config import GROK_1, Dtype, HeadDtype
from export_grok.engines.trt.bindings import bindings_of
from export_grok.engines.trt.record import PHASES, Binding, Phase, Sizes
from export_grok.errors import BuildError, ConfigError
from export_grok.export.contract import GRAPH_KINDS, GraphKind, ports, weight_prefix
from export_grok.export.parameters import head_parameters, model_parameters
from export_grok.weights import NUMPY_DTYPES
from tests.conftest import load_golden
from tests.engines.trt.lowered import MANY, Lowered, bindings, lowered, part, stored, weights

EACH_PHASE = list(itertools.product(GRAPH_KINDS, PHASES))
ELEMENTS: Mapping[Any, np.dtype[Any]] = {**NUMPY_DTYPES, "int64": np.dtype(np.int64)}
# A trace of each takes a second, so not all dtypes are on all numbers of ranks.
SOME: list[tuple[GraphKind, str, Dtype, int]] = [
    *((kind, "tiny8", "float32", 8) for kind in GRAPH_KINDS),
    *((kind, "tiny8", "bfloat16", 1) for kind in GRAPH_KINDS),
    *((kind, "tiny8", "float16", 8) for kind in GRAPH_KINDS),
    ("layer", "tiny", "float32", 2),  # of one group of scales
]


def chosen(
    name: str,
    kind: GraphKind,
    phase: Phase,
    dtype: Dtype,
    ranks: int,
    head: HeadDtype = "float32",
) -> Lowered:
    sizes = Sizes(tensor_parallel=ranks, batch=2, chunk=MANY, max_length=40)
    config = load_golden(name).config
    return Lowered(config=config, kind=kind, phase=phase, sizes=sizes, dtype=dtype, head=head)


def full_size(kind: GraphKind, phase: Phase) -> Lowered:
    return Lowered(
        config=GROK_1,
        kind=kind,
        phase=phase,
        sizes=Sizes(tensor_parallel=8),
        dtype="bfloat16",
    )


def of_kind(graph: Lowered) -> set[str]:
    """Return the names in the index, layer 0, of all weights that a graph of this kind takes."""
    names = set(model_parameters(graph.config))
    if graph.kind == "layer":
        return {name for name in names if name.startswith("layers.0.")}
    if graph.kind == "embedding":
        return {"embedding.weight"}
    if graph.head == "int8":
        return set(head_parameters(graph.config))
    return {"embedding.weight", "final_norm.scale"}


def inputs_of(rows: tuple[Binding, ...]) -> list[Binding]:
    return [row for row in rows if row.direction == "in"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("kind", "name", "dtype", "ranks"), SOME)
def test_bindings_are_the_graphs_inputs_and_outputs_in_their_order(
    name: str, kind: GraphKind, phase: Phase, dtype: Dtype, ranks: int
) -> None:
    graph = chosen(name, kind, phase, dtype, ranks)
    model, rows = lowered(graph), bindings(graph)
    values = [*model.graph.inputs, *model.graph.outputs]
    directions = ["in"] * len(model.graph.inputs) + ["out"] * len(model.graph.outputs)
    assert [row.name for row in rows] == [value.name for value in values]
    assert [row.direction for row in rows] == directions
    for row, value in zip(rows, values, strict=True):
        assert value.shape is not None and value.dtype is not None
        assert row.shape == tuple(value.shape.numpy())
        assert ELEMENTS[row.dtype] == value.dtype.numpy()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("kind", "name", "dtype", "ranks"), SOME)
def test_every_input_is_a_port_or_a_weight_of_its_kind(
    name: str, kind: GraphKind, phase: Phase, dtype: Dtype, ranks: int
) -> None:
    graph = chosen(name, kind, phase, dtype, ranks)
    batch, tokens = graph.sizes.rows(phase)
    letters: dict[int | str, int] = {"B": batch, "S": tokens, "T": graph.sizes.slots}
    known = {
        (row.name, tuple(letters.get(axis, axis) for axis in row.shape), row.dtype, row.aliases)
        for row in ports(kind, graph.config, dtype, ranks)
    }
    own = {row for row in bindings(graph) if row.weight is None}
    assert {(row.name, row.shape, row.dtype, row.aliases) for row in own} == known
    assert all(row.cut is None for row in own)
    bound = [f"{weight_prefix(kind, 0)}{row.weight}" for row in bindings(graph) if row.weight]
    assert sorted(bound) == sorted(of_kind(graph))
    assert all(row.weight in (None, row.name) for row in bindings(graph))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("kind", "name", "dtype", "ranks"), SOME)
def test_the_parts_of_all_ranks_are_the_stored_tensor_bit_for_bit(
    name: str, kind: GraphKind, phase: Phase, dtype: Dtype, ranks: int
) -> None:
    graph = chosen(name, kind, phase, dtype, ranks)
    prefix, arrays = weight_prefix(kind, 0), stored(name)
    of_ranks = [weights(graph, arrays, rank) for rank in range(ranks)]
    for row in bindings(graph):
        if row.weight is None:
            continue
        whole = arrays[f"{prefix}{row.weight}"]
        found = [own[row.name] for own in of_ranks]
        assert {array.shape for array in found} == {row.shape}
        together = found[0] if row.cut is None else np.concatenate(found, row.cut)
        np.testing.assert_array_equal(together, whole.astype(together.dtype))
        if f"{prefix}{row.weight}" == "embedding.weight":
            assert row.dtype == dtype
        else:
            assert together.dtype == whole.dtype
            assert row.dtype == whole.dtype.name


@pytest.mark.parametrize("phase", PHASES)
def test_the_weights_of_an_int8_head_are_cut_by_its_columns(phase: Phase) -> None:
    graph = chosen("tiny8", "head", phase, "bfloat16", 8, "int8")
    found = {row.name: row for row in bindings(graph) if row.weight}
    assert found.keys() == set(head_parameters(graph.config))
    assert {name: (row.shape, row.dtype, row.cut) for name, row in found.items()} == {
        "unembedding.weight": ((128, 80), "int8", 1),
        "unembedding.scales": ((1, 80), "float32", 1),
        "final_norm.scale": ((128,), "float32", None),
    }
    arrays = stored("tiny8")
    for name, row in found.items():
        if row.cut is not None:
            together = [part(arrays[name], row.cut, 8, rank) for rank in range(8)]
            np.testing.assert_array_equal(np.concatenate(together, row.cut), arrays[name])


def test_caches_alias_and_nothing_else_does() -> None:
    for kind, phase in EACH_PHASE:
        rows = bindings(chosen("tiny8", kind, phase, "float32", 8))
        aliases = {row.name: row.aliases for row in rows if row.aliases}
        assert aliases == ({"k_out": "k_cache", "v_out": "v_cache"} if kind == "layer" else {})
        by_name = {row.name: row for row in rows}
        for out, into in aliases.items():
            assert (by_name[out].shape, by_name[out].dtype) == (
                by_name[str(into)].shape,
                by_name[str(into)].dtype,
            )


@pytest.mark.parametrize("kind", GRAPH_KINDS)
def test_both_phases_are_bound_to_the_same_weights(kind: GraphKind) -> None:
    found = [
        {row for row in bindings(chosen("tiny8", kind, phase, "float32", 8)) if row.weight}
        for phase in PHASES
    ]
    assert found[0] == found[1]


def test_embedding_and_head_are_bound_to_the_same_table() -> None:
    (embedding,) = (
        row for row in bindings(chosen("tiny8", "embedding", "decode", "float16", 8)) if row.weight
    )
    for kind in ("head", "head_all"):
        (table,) = (
            row
            for row in bindings(chosen("tiny8", kind, "decode", "float16", 8))
            if row.weight == "embedding.weight"
        )
        assert (table.shape, table.dtype, table.cut) == (
            embedding.shape,
            embedding.dtype,
            embedding.cut,
        )
        assert table.shape == (80, 128)


# ---- a layer of the released model on 8 ranks, which has no data here

# By hand: 48 and 8 heads of 128 are 6 and 1, 32768 columns are 4096, 8 groups of rows are 1.
LAYER = {
    "pre_attn_norm.scale": ("float32", (6144,), None),
    "attention.query.weight": ("int8", (6144, 768), 1),
    "attention.query.scales": ("bfloat16", (1, 768), 1),
    "attention.key.weight": ("int8", (6144, 128), 1),
    "attention.key.scales": ("bfloat16", (1, 128), 1),
    "attention.value.weight": ("int8", (6144, 128), 1),
    "attention.value.scales": ("bfloat16", (1, 128), 1),
    "attention.out.weight": ("int8", (768, 6144), 0),
    "attention.out.scales": ("bfloat16", (1, 6144), 0),
    "post_attn_norm.scale": ("float32", (6144,), None),
    "pre_moe_norm.scale": ("float32", (6144,), None),
    "router.weight": ("float32", (6144, 8), None),
    "experts.gate.weight": ("int8", (8, 6144, 4096), 2),
    "experts.gate.scales": ("bfloat16", (8, 1, 4096), 2),
    "experts.up.weight": ("int8", (8, 6144, 4096), 2),
    "experts.up.scales": ("bfloat16", (8, 1, 4096), 2),
    "experts.down.weight": ("int8", (8, 4096, 6144), 1),
    "experts.down.scales": ("bfloat16", (8, 1, 6144), 1),
    "post_moe_norm.scale": ("float32", (6144,), None),
}
CACHE = ("bfloat16", (1, 1, 8448, 128))


@pytest.mark.parametrize(("phase", "tokens"), [("decode", 1), ("prefill", 256)])
def test_the_bindings_of_a_layer_of_full_size_are_those_counted_by_hand(
    phase: Phase, tokens: int
) -> None:
    rows = bindings(full_size("layer", phase))
    found = {row.name: (row.dtype, row.shape, row.cut) for row in rows if row.weight}
    assert found == LAYER
    hidden = ("bfloat16", (1, tokens, 6144))
    assert {row.name: (row.dtype, row.shape) for row in rows if not row.weight} == {
        "h": hidden,
        "start": ("int64", (1,)),
        "k_cache": CACHE,
        "v_cache": CACHE,
        "h_out": hidden,
        "k_out": CACHE,
        "v_out": CACHE,
    }


# ---- what is refused


def refusal(model: ir.Model, ranks: int = 1) -> str:
    config = load_golden("tiny8").config
    with pytest.raises(BuildError) as caught:
        bindings_of(model.graph, "layer", config, "float32", ranks)
    return str(caught.value)


def layer() -> ir.Model:
    """Return a layer to break."""
    return lowered(chosen("tiny8", "layer", "decode", "float32", 1)).clone()


def test_an_unknown_input_is_named() -> None:
    model = layer()
    model.graph.inputs[5].name = "attention.query.waits"
    assert "input attention.query.waits of graph 'layer' is neither port nor weight" in (
        refusal(model)
    )


def test_a_graph_for_another_number_of_ranks_is_refused_with_both_shapes() -> None:
    text = refusal(layer(), ranks=8)
    assert "layers.0.attention.query.weight has shape (128, 128)" in text
    assert "a rank's part has (128, 16)" in text


@pytest.mark.parametrize("shape", [["B"], [0], None])
def test_a_port_without_a_fixed_length_is_refused(shape: list[str | int] | None) -> None:
    model = layer()
    model.graph.inputs[1].shape = None if shape is None else ir.Shape(shape)
    assert "start has shape" in refusal(model)


def test_ranks_that_do_not_divide_are_refused_with_those_that_do() -> None:
    config = load_golden("tiny8").config
    with pytest.raises(ConfigError, match="by 3 ranks; use 1, 2, 4, 8"):
        bindings_of(layer().graph, "layer", config, "float32", 3)
    with pytest.raises(ConfigError, match="by 4 ranks; use 1, 2"):
        load_golden("tiny").config.for_rank(4)
