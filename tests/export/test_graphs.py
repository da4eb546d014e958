"""A stamped graph points at the bytes of its weights, and computes with them what it must."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from export_grok.config import Dtype, GrokConfig
from export_grok.errors import BuildError, OutputError
from export_grok.export.contract import GraphKind, weight_prefix
from export_grok.export.graphs import stamped, write_graph
from export_grok.export.load import layer_from_index
from export_grok.weights import Weight, WeightIndex
from tests.conftest import FIXTURES, Golden, TemplateOf
from tests.parity import BFLOAT16_MEAN, FLOAT32_TOLERANCE

Array = NDArray[Any]
GetGolden = Callable[[str], Golden]

SINGLE: tuple[GraphKind, ...] = ("embedding", "head", "head_all")


def stamp(
    golden: Golden,
    template_of: TemplateOf,
    kind: GraphKind,
    layer: int | None = None,
    dtype: Dtype = "float32",
) -> ir.Model:
    template = template_of(golden.name, kind, dtype)
    return stamped(template, kind, golden.config, dtype, golden.index, layer=layer)


def session(path: Path, weights: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(weights)
    )
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FIXTURES), ("tiny", "bfloat16")]
)
def test_every_initialiser_points_at_the_bytes_of_its_weight(
    name: str, dtype: Dtype, golden_of: GetGolden, template_of: TemplateOf, tmp_path: Path
) -> None:
    golden = golden_of(name)
    last = golden.config.num_layers - 1
    layers: list[tuple[GraphKind, int | None]] = [("layer", 0), ("layer", last)]
    for kind, layer in [*layers, *((kind, None) for kind in SINGLE)]:
        path = tmp_path / "graph.onnx"
        write_graph(stamp(golden, template_of, kind, layer, dtype), path)
        assert path.stat().st_size < 100_000
        stored = onnx.load(path, load_external_data=False).graph.initializer
        prefix = weight_prefix(kind, layer)
        found = {}
        for tensor in stored:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                place = {entry.key: entry.value for entry in tensor.external_data}
                found[f"{prefix}{tensor.name}"] = (
                    place["location"],
                    int(place["offset"]),
                    int(place["length"]),
                    tuple(tensor.dims),
                )
        wanted = {
            weight.name: (weight.file, weight.offset, weight.nbytes, weight.shape)
            for weight in golden.index
            if weight.name.startswith(prefix if kind == "layer" else ("embedding.", "final_norm."))
        }
        if kind == "embedding":
            del wanted["final_norm.scale"]
        assert found == wanted


def test_only_the_ports_are_left_as_inputs(golden: Golden, template_of: TemplateOf) -> None:
    model = stamp(golden, template_of, "layer", 1)
    names = [value.name for value in model.graph.inputs]
    assert names == ["h", "start", "k_cache", "v_cache"]


def test_the_template_stays_as_it_was(golden: Golden, template_of: TemplateOf) -> None:
    template = template_of(golden.name, "layer", "float32")
    before = ir.serde.serialize_model(template).SerializeToString(deterministic=True)
    stamp(golden, template_of, "layer", 1)
    after = ir.serde.serialize_model(template).SerializeToString(deterministic=True)
    assert after == before


def test_graphs_of_two_layers_differ_in_places_and_name_only(
    golden: Golden, template_of: TemplateOf
) -> None:
    protos = [
        ir.serde.serialize_model(stamp(golden, template_of, "layer", layer)) for layer in (0, 1)
    ]
    assert [proto.graph.name for proto in protos] == ["grok1_layer_0", "grok1_layer_1"]
    for proto in protos:
        proto.graph.name = ""
        for tensor in proto.graph.initializer:
            del tensor.external_data[:]
    assert protos[0] == protos[1]


def test_64_graphs_of_one_template_are_small(
    golden_of: GetGolden, template_of: TemplateOf, tmp_path: Path
) -> None:
    golden = golden_of("tiny")
    config = dataclasses.replace(golden.config, num_layers=64)
    base = {name: weight for name, weight in golden.index.weights.items() if "layers.0" in name}
    weights: dict[str, Weight] = {}
    for layer in range(64):
        for name, weight in base.items():
            weights[name.replace("layers.0.", f"layers.{layer}.")] = weight
    index = WeightIndex(root=golden.folder, weights=weights, files=golden.index.files)
    template = template_of("tiny", "layer", "float32")
    for layer in range(64):
        model = stamped(template, "layer", config, "float32", index, layer=layer)
        write_graph(model, tmp_path / f"layer_{layer}.onnx")
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 64
    assert sum(sizes) < 64 * 25_000


# ---- what cannot be stamped


def refusal(golden: Golden, template_of: TemplateOf, weights: dict[str, Weight]) -> str:
    index = WeightIndex(root=golden.folder, weights=weights, files=golden.index.files)
    with pytest.raises(BuildError) as caught:
        stamped(
            template_of("tiny", "layer", "float32"),
            "layer",
            golden.config,
            "float32",
            index,
            layer=1,
        )
    return str(caught.value)


def test_missing_and_wrong_weights_are_all_named(
    golden_of: GetGolden, template_of: TemplateOf
) -> None:
    golden = golden_of("tiny")
    weights = dict(golden.index.weights)
    del weights["layers.1.attention.key.scales"]
    del weights["layers.1.router.weight"]
    wide = weights["layers.1.experts.up.weight"]
    weights[wide.name] = dataclasses.replace(wide, shape=(8, 96, 128))
    norm = weights["layers.1.pre_moe_norm.scale"]
    weights[norm.name] = dataclasses.replace(norm, dtype="bfloat16")
    text = refusal(golden, template_of, weights)
    assert "graph 'layer' cannot be stamped" in text
    assert "layers.1.attention.key.scales is not in the weight index" in text
    assert "layers.1.router.weight is not in the weight index" in text
    assert (
        "layers.1.experts.up.weight is int8[8, 96, 128], the graph takes INT8[8, 96, 256]" in text
    )
    assert "layers.1.pre_moe_norm.scale is bfloat16[96], the graph takes FLOAT[96]" in text
    assert text.count(";") == 3


def test_a_layer_that_the_index_lacks_is_refused(
    golden_of: GetGolden, template_of: TemplateOf
) -> None:
    golden = golden_of("tiny")
    with pytest.raises(BuildError, match=r"layers\.2\.router\.weight is not in the weight index"):
        stamp(golden, template_of, "layer", 2)


def test_a_graph_that_cannot_be_written_says_so(
    golden_of: GetGolden, template_of: TemplateOf, tmp_path: Path
) -> None:
    model = stamp(golden_of("tiny"), template_of, "embedding")
    with pytest.raises(OutputError):
        write_graph(model, tmp_path / "nowhere" / "graph.onnx")
    assert list(tmp_path.iterdir()) == []


# ---- what a stamped graph computes


@pytest.fixture
def checkpoint_of(tmp_path: Path, golden_of: GetGolden) -> Callable[[str], Path]:
    """Return the way to a copy of a checkpoint that graphs may be written beside."""

    def copied(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(golden_of(name).folder / "ckpt-0", folder / "ckpt-0")
        return folder

    return copied


def test_a_graph_beside_the_weights_loads_as_any_onnx_file(
    golden: Golden, template_of: TemplateOf, checkpoint_of: Callable[[str], Path]
) -> None:
    folder = checkpoint_of(golden.name)
    path = folder / "layer.onnx"
    write_graph(stamp(golden, template_of, "layer", 1), path)
    onnx.checker.check_model(str(path), full_check=True)
    names = [entry.name for entry in ort.InferenceSession(str(path)).get_inputs()]
    assert names == ["h", "start", "k_cache", "v_cache"]
    loaded = onnx.load(path)  # with the weights
    for tensor in loaded.graph.initializer:
        if f"layers.1.{tensor.name}" in golden.index.weights:
            weight = golden.index[f"layers.1.{tensor.name}"]
            data = (golden.folder / weight.file).read_bytes()
            assert tensor.raw_data == data[weight.offset : weight.offset + weight.nbytes]


def layer_inputs(config: GrokConfig, batch: int, tokens: int, slots: int) -> dict[str, Array]:
    """Return inputs of a layer: rows that continue at different positions."""
    random = np.random.default_rng(3)
    start = np.arange(batch) * 5 % (slots - tokens + 1)
    shape = (batch, config.num_kv_heads, slots, config.key_size)
    return {
        "h": random.normal(size=(batch, tokens, config.emb_size)).astype(np.float32),
        "start": start.astype(np.int64),
        "k_cache": random.normal(size=shape).astype(np.float32),
        "v_cache": random.normal(size=shape).astype(np.float32),
    }


@pytest.mark.parametrize("name", FIXTURES)
def test_a_layer_runs_at_sizes_other_than_the_examples(
    name: str, golden_of: GetGolden, template_of: TemplateOf, tmp_path: Path
) -> None:
    golden = golden_of(name)
    path = tmp_path / "layer.onnx"
    write_graph(stamp(golden, template_of, "layer", 1), path)
    runs = session(path, golden.folder)
    module = layer_from_index(golden.config, golden.index, 1)
    sizes = ((1, 1, 1), (1, 1, 40), (3, 1, 29), (3, 2, 29), (3, 17, 40), (3, 29, 29))
    for batch, tokens, slots in sizes:
        inputs = layer_inputs(golden.config, batch, tokens, slots)
        outputs = runs.run(["h_out", "k_out", "v_out"], inputs)
        expected = module(*(torch.from_numpy(array.copy()) for array in inputs.values()))
        for mine, other in zip(outputs, expected, strict=True):
            assert isinstance(mine, np.ndarray)
            np.testing.assert_allclose(mine, other.numpy(), rtol=0, atol=FLOAT32_TOLERANCE)


def test_the_head_gives_the_logits_of_the_asked_token(
    golden: Golden, template_of: TemplateOf, tmp_path: Path
) -> None:
    found = {}
    hidden = golden.arrays["f32/hidden"][:, -1]
    last = np.array([3, 11], np.int64)
    for kind in SINGLE[1:]:
        path = tmp_path / f"{kind}.onnx"
        write_graph(stamp(golden, template_of, kind), path)
        inputs = {"h": hidden, "last": last} if kind == "head" else {"h": hidden}
        (found[kind],) = session(path, golden.folder).run(["logits"], inputs)
    whole = golden.arrays["f32/prefill_logits"]
    np.testing.assert_allclose(found["head_all"], whole, rtol=0, atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(found["head"], whole[[0, 1], last], rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_stamped_graphs_in_a_row_reproduce_the_goldens(
    golden: Golden, template_of: TemplateOf, tmp_path: Path, poison: float
) -> None:
    """Prefill in two chunks, then decode, with all ops as function bodies."""
    config, arrays = golden.config, golden.arrays

    def load(kind: GraphKind, layer: int | None = None) -> ort.InferenceSession:
        path = tmp_path / "graph.onnx"
        write_graph(stamp(golden, template_of, kind, layer), path)
        return session(path, golden.folder)

    embedding, head = load("embedding"), load("head_all")
    layers = [load("layer", layer) for layer in range(config.num_layers)]
    rows, length = arrays["tokens"].shape
    shape = (rows, config.num_kv_heads, length + 8, config.key_size)
    caches: list[tuple[Any, Any]] = [(np.full(shape, poison, np.float32),) * 2 for _ in layers]

    def step(tokens: Array, start: int) -> Array:
        (h,) = embedding.run(["h"], {"tokens": tokens.astype(np.int64)})
        starts = np.full(rows, start, np.int64)
        for layer, runs in enumerate(layers):
            keys, values = caches[layer]
            inputs = {"h": h, "start": starts, "k_cache": keys, "v_cache": values}
            h, *after = runs.run(["h_out", "k_out", "v_out"], inputs)
            caches[layer] = (after[0], after[1])
        (logits,) = head.run(["logits"], {"h": h})
        assert isinstance(logits, np.ndarray)
        return logits

    tokens = arrays["tokens"]
    prefill = np.concatenate([step(tokens[:, :7], 0), step(tokens[:, 7:], 7)], axis=1)
    decode = [
        step(fed[:, None], length + at)[:, 0]
        for at, fed in enumerate(arrays["f32/decode_tokens"].T)
    ]
    for mine, name in ((prefill, "prefill_logits"), (np.stack(decode, 1), "decode_logits")):
        np.testing.assert_allclose(mine, arrays[f"f32/{name}"], rtol=0, atol=FLOAT32_TOLERANCE)


def test_bfloat16_graphs_reproduce_the_goldens_in_the_evaluator_of_onnx(
    golden: Golden, template_of: TemplateOf, checkpoint_of: Callable[[str], Path]
) -> None:
    """The function bodies round where the original does. The evaluator is numpy, op by op."""
    config, arrays, folder = golden.config, golden.arrays, checkpoint_of(golden.name)

    def run(inputs: dict[str, Any], kind: GraphKind, layer: int | None = None) -> list[Any]:
        path = folder / "graph.onnx"
        write_graph(stamp(golden, template_of, kind, layer, "bfloat16"), path)
        return list(ReferenceEvaluator(onnx.load(path)).run(None, inputs))

    tokens = arrays["tokens"].astype(np.int64)
    rows, length = tokens.shape
    shape = (rows, config.num_kv_heads, length, config.key_size)
    empty = np.zeros(shape, ml_dtypes.bfloat16)
    (h,) = run({"tokens": tokens}, "embedding")
    assert (h.astype(np.float32) == arrays["bf16/hidden"][:, 0]).all()
    for layer in range(config.num_layers):
        inputs = {"h": h, "start": np.zeros(rows, np.int64), "k_cache": empty, "v_cache": empty}
        h, keys, values = run(inputs, "layer", layer)
        assert {h.dtype, keys.dtype, values.dtype} == {np.dtype(ml_dtypes.bfloat16)}
        golden_hidden = arrays["bf16/hidden"][:, layer + 1]
        assert np.abs(h.astype(np.float32) - golden_hidden).mean() <= BFLOAT16_MEAN
    last = arrays["bf16/kv_last_k"].swapaxes(1, 2)
    assert np.abs(keys.astype(np.float32) - last).mean() <= BFLOAT16_MEAN
    (logits,) = run({"h": h}, "head_all")
    assert logits.dtype == np.float32
    assert np.abs(logits - arrays["bf16/prefill_logits"]).mean() <= BFLOAT16_MEAN
    assert (logits.argmax(-1) == arrays["bf16/prefill_logits"].argmax(-1)).all()


def test_a_float16_layer_computes_what_the_model_computes(
    golden_of: GetGolden, template_of: TemplateOf, tmp_path: Path
) -> None:
    golden = golden_of("tiny")
    path = tmp_path / "layer.onnx"
    write_graph(stamp(golden, template_of, "layer", 1, "float16"), path)
    inputs = {
        name: array.astype(np.float16) if array.dtype == np.float32 else array
        for name, array in layer_inputs(golden.config, 3, 5, 17).items()
    }
    outputs = session(path, golden.folder).run(["h_out", "k_out", "v_out"], inputs)
    module = layer_from_index(golden.config, golden.index, 1)
    expected = module(*(torch.from_numpy(array.copy()) for array in inputs.values()))
    for mine, other in zip(outputs, expected, strict=True):
        assert isinstance(mine, np.ndarray)
        assert mine.dtype == np.float16
        np.testing.assert_allclose(mine, other.numpy(), rtol=2**-8, atol=2**-8)
