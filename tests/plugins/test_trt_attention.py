"""softcap_attention as TensorRT gets it, in ONNX Runtime by the functions of its plugin nodes."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx_ir.tape import Tape
from torch import Tensor

from export_grok.config import Dtype
from export_grok.engines.lowering import lower_ops
from export_grok.plugins.op import DOMAIN, VERSION
from export_grok.plugins.registry import part, plugin_nodes, spec
from export_grok.plugins.softcap_attention.trt_plugin import COMBINE, SPLIT, part_slots
from tests.plugins.calls import attention_call
from tests.plugins.formulas import Array, Call
from tests.plugins.interpreted import interpreted

OP = "softcap_attention"
DTYPES: dict[str, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
CALLS = {
    "first-token": attention_call([0], 1, 1),
    "step": attention_call([80], 1, 729, kv_heads=1),
    "last-slot": attention_call([728], 1, 729, kv_heads=1, size=16),
    "ragged-step": attention_call([0, 8, 80, 728, 1, 300, 15, 16], 1, 733, group=5, size=24),
    "loud-step": attention_call([600, 70], 1, 700, loudness=60.0),
    "first-chunk": attention_call([0], 9, 81),
    "chunk": attention_call([64], 16, 81, kv_heads=1, size=80),
    "last-slots": attention_call([72], 9, 81, group=1, size=16),
    "ragged-chunk": attention_call([0, 61, 20], 9, 71, group=5),
    "loud-chunk": attention_call([3, 70], 9, 80, loudness=60.0),
}
STEPS = [name for name, call in CALLS.items() if call.inputs["query"].shape[1] == 1]


def value(name: str, dtype: ir.DataType, shape: tuple[int | str, ...]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def model_of(tape: Tape, inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Model:
    graph = ir.Graph(
        inputs, outputs, nodes=tape.nodes, opset_imports={"": 24, DOMAIN: VERSION}, name=OP
    )
    return ir.Model(graph, ir_version=11)


def with_functions(model: ir.Model) -> ir.Model:
    for body in part(OP, "trt_function").FUNCTIONS:
        function = ir.serde.deserialize_function(body.to_function_proto())
        model.functions[function.identifier()] = function
    return model


def op_graph(call: Call, dtype: Dtype) -> ir.Model:
    """Return a graph of the op alone, of the shapes of a call."""
    found, tape, kind = spec(OP), Tape(), DTYPES[dtype]
    inputs = [
        value(row.name, kind if row.dtype == "T" else ir.DataType.INT64, array.shape)
        for row, array in zip(found.inputs, call.inputs.values(), strict=True)
    ]
    outputs = tape.op_multi_out(
        found.op_type, inputs, call.attributes, num_outputs=3, domain=DOMAIN
    )
    like = ("query", "k_cache", "v_cache")
    for output, row, name in zip(outputs, found.outputs, like, strict=True):
        output.name, output.type = row.name, ir.TensorType(kind)
        output.shape = ir.Shape(call.inputs[name].shape)
    return model_of(tape, inputs, list(outputs))


def lowered(call: Call, dtype: Dtype) -> ir.Model:
    model = op_graph(call, dtype)
    lower_ops(model, "trt").check()
    return with_functions(model)


def run(model: ir.Model, inputs: dict[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    content = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, inputs)
    return found


def in_dtype(call: Call, dtype: str) -> dict[str, Array]:
    return {
        name: array if name == "start" else array.astype(dtype)
        for name, array in call.inputs.items()
    }


def by_reference(inputs: dict[str, Array], call: Call) -> list[Array]:
    part(OP, "reference")
    tensors = [torch.from_numpy(array) for array in inputs.values()]
    operator = getattr(getattr(torch.ops, DOMAIN), OP)
    return [tensor.numpy() for tensor in operator(*tensors, *call.attributes.values())]


def op_types(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_lowered_graph_agrees_with_the_reference(call: Call) -> None:
    """Whatever lies beyond a row's tokens: it is NaN here. The caches agree bit for bit."""
    found = run(lowered(call, "float32"), call.inputs)
    expected = by_reference(call.inputs, call)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
    for mine, other in zip(found[1:], expected[1:], strict=True):
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_in_float16_it_is_as_near_as_the_rounding_of_logits_lets_it(call: Call) -> None:
    """The reference rounds q.k to T and a plugin does not: by 2^-11 of it at most.

    The slope of cap tanh(x / cap) times x is below 0.45 cap, so a logit is off by less than 2^-7,
    and a result by as much of the largest.
    """
    inputs = in_dtype(call, "float16")
    found, expected = run(lowered(call, "float16"), inputs), by_reference(inputs, call)
    assert {array.dtype for array in found} == {np.dtype(np.float16)}
    size = abs(expected[0].astype(np.float64)).max()
    off = abs(found[0].astype(np.float64) - expected[0]).max()
    assert off <= 2.0**-7 * size
    for mine, other in zip(found[1:], expected[1:], strict=True):
        assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", CALLS)
def test_one_token_is_the_plugins_and_many_are_standard_nodes(name: str) -> None:
    model = lowered(CALLS[name], "bfloat16")
    plugins = [node for node in model.graph if node.domain == DOMAIN]
    if name not in STEPS:
        assert not plugins
        return
    assert [node.op_type for node in plugins] == ["GrokAttentionSplit", "GrokAttentionCombine"]
    for node in plugins:
        assert node.attributes["plugin_namespace"].value == DOMAIN
        assert node.attributes["plugin_version"].value == "1"
        named = set(node.attributes) - {"plugin_namespace", "plugin_version"}
        assert named == set(plugin_nodes()[node.op_type].attributes)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_cache_is_written_by_one_node_from_the_input_to_the_output(call: Call) -> None:
    model = lowered(call, "bfloat16")
    for source, output in zip(model.graph.inputs[3:5], model.graph.outputs[1:], strict=True):
        node = output.producer()
        assert node is not None
        assert node.op_type == "TensorScatter"
        assert node.inputs[0] is source
        assert source.consumers() == (node,)
        assert output.shape == source.shape
    assert "Attention" not in op_types(model)


@pytest.mark.parametrize("name", ["ragged-step", "ragged-chunk"])
def test_the_caches_stay_in_their_dtype(name: str) -> None:
    model = lowered(CALLS[name], "bfloat16")
    for output in model.graph.outputs[1:]:
        assert not {node.op_type for node in output.consumers()} & {"Cast", "CastLike"}


def test_a_shape_that_is_not_fixed_is_refused() -> None:
    model = op_graph(CALLS["step"], "float32")
    query = model.graph.inputs[0]
    query.shape = ir.Shape([1, "S", 144])
    report = lower_ops(model, "trt")
    assert not report.lowered
    (reason,) = report.reasons
    assert "query has shape [1,S,144]" in reason


# ---- the function of each plugin node is what its kernel computes


def by_function(
    op_type: str, inputs: dict[str, Array], dtypes: dict[str, ir.DataType], **attributes: Any
) -> list[Array]:
    node, tape = plugin_nodes()[op_type], Tape()
    operands = [value(name, dtypes[name], array.shape) for name, array in inputs.items()]
    outputs = tape.op_multi_out(
        op_type, operands, attributes, num_outputs=len(node.outputs), domain=DOMAIN
    )
    for output, row in zip(outputs, node.outputs, strict=True):
        output.name, output.type = row.name, ir.TensorType(ir.DataType.FLOAT)
    return run(with_functions(model_of(tape, operands, list(outputs))), inputs)


@pytest.mark.parametrize(("slots", "parts"), [(41, 3), (33, 4), (48, 3), (16, 1), (250, 7)])
def test_the_functions_compute_what_the_kernels_do(slots: int, parts: int) -> None:
    """Part by part, those included that end behind the cache or of which a row sees nothing."""
    pytest.importorskip("triton")
    call = attention_call([0, 15, slots - 1], 1, slots, group=3, size=20)
    query, *_, start = call.inputs.values()
    _, k_out, v_out = by_reference(call.inputs, call)
    inputs = {"query": query, "k_cache": k_out, "v_cache": v_out, "start": start}
    dtypes = dict.fromkeys(inputs, ir.DataType.FLOAT) | {"start": ir.DataType.INT64}
    attributes: dict[str, Any] = {"parts": parts, "scale": 0.3, "cap": 30.0}
    sums, stats = by_function("GrokAttentionSplit", inputs, dtypes, **attributes)
    kernel = interpreted(SPLIT, tensors(inputs), dtype="float32", **attributes)
    unseen = [np.isneginf(of[..., 0]) for of in (stats, kernel[1].numpy())]
    np.testing.assert_array_equal(unseen[0], unseen[1])
    assert unseen[0].any() == (part_slots(slots, parts) < slots)
    for mine, other in zip((sums, stats), kernel, strict=True):
        np.testing.assert_allclose(mine, other.numpy(), rtol=1e-5, atol=2e-5)

    inputs = {"sums": sums, "stats": stats}
    dtypes = dict.fromkeys(inputs, ir.DataType.FLOAT)
    (y,) = by_function("GrokAttentionCombine", inputs, dtypes, to=1)
    (combined,) = interpreted(COMBINE, tensors(inputs), dtype="float32", to=1)
    np.testing.assert_allclose(y, combined.numpy(), rtol=0, atol=1e-6)


def tensors(inputs: dict[str, Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in inputs.items()}


# ---- TensorRT-RTX


@pytest.mark.parametrize("name", ["ragged-step", "step", "chunk", "ragged-chunk"])
def test_tensorrt_rtx_builds_the_graph(name: str) -> None:
    """It has no plugins: it takes their functions, and the cache writes as they are."""
    trt = pytest.importorskip("tensorrt_rtx")
    model = lowered(CALLS[name], "bfloat16")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(ir.to_proto(model).SerializeToString())
    assert parsed, [parser.get_error(index).desc() for index in range(parser.num_errors)]
    layers = [network.get_layer(index).type for index in range(network.num_layers)]
    assert layers.count(trt.LayerType.KV_CACHE_UPDATE) == 2
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    assert builder.build_serialized_network(network, config) is not None
