"""The parts of a graph, run one after the other with the sum taken between, are the graph."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.config import HeadDtype
from export_grok.engines.cut import PARTIAL, SUM, Part, cut
from export_grok.engines.trt.record import PHASES, Phase, Sizes
from export_grok.errors import BuildError
from export_grok.export.contract import GraphKind
from tests.bundles import traced
from tests.conftest import load_golden
from tests.engines.trt.lowered import Lowered, lowered

Arrays = dict[str, NDArray[Any]]

COLLECTIVES = ("GrokAllReduce", "DistCollective")
DIMENSIONS = {"B": 2, "S": 3, "T": 5}
INTEGERS = {"tokens": 7, "first": 0, "start": 1, "last": 2}


def content(model: ir.Model) -> bytes:
    found: bytes = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    return found


def run(model: ir.Model, inputs: Arrays) -> Arrays:
    """Run a graph on those of the inputs that it has."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(content(model), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    own = {str(value.name): inputs[str(value.name)] for value in model.graph.inputs}
    kinds = {str(value.name): value.dtype for value in model.graph.inputs}
    feeds = {}
    for name, array in own.items():
        kind = kinds[name]
        assert kind is not None
        bits = array.view(np.int16) if kind == ir.DataType.BFLOAT16 else array
        feeds[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, int(kind))
    found = session.run_with_ort_values(names, feeds)
    return {name: value.numpy() for name, value in zip(names, found, strict=True)}


def run_parts(parts: list[Part], inputs: Arrays) -> Arrays:
    """Run parts as two ranks that have the same would."""
    values = dict(inputs)
    for part in parts:
        values |= run(part.model, values)
        assert part.summed == (PARTIAL in [value.name for value in part.model.graph.outputs])
        if part.summed:
            values[SUM] = values.pop(PARTIAL) * 2
    return values


def doubled(model: ir.Model) -> ir.Model:
    """Return the graph of two ranks that have the same: a sum is twice its part."""
    whole = model.clone()
    for node in list(whole.graph):
        if node.op_type in COLLECTIVES:
            x = node.inputs[0]
            twice = ir.Node("", "Add", [x, x])
            ir.convenience.replace_nodes_and_values(
                whole.graph, node, [node], [twice], node.outputs, twice.outputs
            )
    return whole


def random_inputs(model: ir.Model) -> Arrays:
    """Return numbers for all inputs, weights too."""
    random = np.random.default_rng(5)
    inputs: Arrays = {}
    for value in model.graph.inputs:
        assert value.shape is not None and value.dtype is not None
        shape = [
            axis if isinstance(axis, int) else DIMENSIONS[str(axis.value)] for axis in value.shape
        ]
        name = str(value.name)
        if name in INTEGERS:
            inputs[name] = np.full(shape, INTEGERS[name], np.int64)
        elif value.dtype == ir.DataType.INT8:
            inputs[name] = random.integers(-99, 99, shape).astype(np.int8)
        else:
            inputs[name] = random.normal(size=shape).astype(value.dtype.numpy())
    return inputs


def check(model: ir.Model) -> list[Part]:
    """Hold the parts of a graph to the whole, and return them."""
    before = content(model)
    parts = cut(model)
    assert content(model) == before
    assert [content(part.model) for part in cut(model)] == [content(part.model) for part in parts]
    for part in parts:
        onnx.checker.check_model(ir.serde.serialize_model(part.model), full_check=True)
        assert not any(node.op_type in COLLECTIVES for node in part.model.graph)
    inputs = random_inputs(model)
    wanted = run(doubled(model), inputs)
    found = run_parts(parts, inputs)
    last = [str(value.name) for value in model.graph.outputs]
    for name in last:
        # Where the sum is the last node, it is the output itself.
        own = found[SUM] if name not in found else found[name]
        np.testing.assert_array_equal(own, wanted[name], name)
    return parts


def names(values: Any) -> list[str]:
    return [str(value.name) for value in values]


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("tiny8", 8)])
def test_a_layer_is_cut_into_attention_experts_and_the_end(name: str, ranks: int) -> None:
    template = traced("layer", load_golden(name).config, "float32", "float32", ranks)
    parts = check(template)
    assert [part.summed for part in parts] == [True, True, False]
    attention, experts, end = (part.model.graph for part in parts)
    assert names(attention.outputs) == [PARTIAL, "k_out", "v_out"]
    assert names(attention.inputs)[:4] == ["h", "start", "k_cache", "v_cache"]
    (crossing,) = names(experts.outputs)[1:]
    assert names(experts.outputs) == [PARTIAL, crossing]
    assert names(experts.inputs)[0] == "h"
    assert names(experts.inputs)[-1] == SUM
    assert names(end.inputs) == ["post_moe_norm.scale", SUM, crossing]
    assert names(end.outputs) == ["h_out"]
    weights = names(template.graph.inputs)[4:]
    held = [name for part in parts for name in names(part.model.graph.inputs) if "." in name]
    assert sorted(held) == sorted(weights)
    assert all(part.model.graph.outputs[0].dtype == ir.DataType.FLOAT for part in parts)


def test_an_embedding_ends_in_its_sum() -> None:
    template = traced("embedding", load_golden("tiny8").config, "float32", "float32", 8)
    (part,) = check(template)
    assert part.summed
    assert names(part.model.graph.outputs) == [PARTIAL]


@pytest.mark.parametrize(("kind", "head"), [("head", "float32"), ("head_all", "int8")])
def test_a_head_stays_whole(kind: GraphKind, head: HeadDtype) -> None:
    template = traced(kind, load_golden("tiny8").config, "float32", head, 8)
    (part,) = check(template)
    assert not part.summed
    assert names(part.model.graph.inputs) == names(template.graph.inputs)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["layer", "embedding"])
def test_a_graph_for_tensorrt_is_cut_likewise(kind: GraphKind, phase: Phase) -> None:
    sizes = Sizes(tensor_parallel=8, batch=2, chunk=4, max_length=9)
    graph = Lowered(
        config=load_golden("tiny8").config, kind=kind, phase=phase, sizes=sizes, dtype="float32"
    )
    parts = check(lowered(graph))
    assert [part.summed for part in parts] == ([True] if kind == "embedding" else [1, 1, 0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_summed_is_of_the_dtype_of_the_graph(dtype: Any) -> None:
    template = traced("layer", load_golden("tiny8").config, dtype, "float32", 2)
    wanted = ir.DataType[dtype.upper()]
    for part in cut(template):
        onnx.checker.check_model(ir.serde.serialize_model(part.model), full_check=True)
        values = [*part.model.graph.inputs, *part.model.graph.outputs]
        assert {v.dtype for v in values if v.name in (PARTIAL, SUM)} == {wanted}


# ---- any graph


@st.composite
def graphs(draw: st.DrawFn) -> ir.Model:
    """Return a graph whose values are used anywhere, with sums anywhere."""
    kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([2])

    def value(name: str) -> ir.Value:
        return ir.Value(name=name, type=kind, shape=shape)

    inputs = [value("x"), value("y")]
    stored = value("stored")
    stored.const_value = ir.tensor(np.array([2, -1], np.float32), name="stored")
    values, nodes = [*inputs, stored], []
    for number in range(draw(st.integers(1, 9))):
        taken = st.sampled_from(values)
        output = value(f"v{number}")
        what = draw(st.sampled_from(["Add", "Sub", "GrokAllReduce", "GrokAllReduce", "Constant"]))
        if what == "Constant":
            attributes = [ir.AttrTensor("value", ir.tensor(np.array([number, 1], np.float32)))]
            node = ir.Node("", what, [], attributes, outputs=[output])
        elif what == "GrokAllReduce":
            ranks = [ir.AttrInt64("ranks", 2)]
            node = ir.Node("grok1", what, [draw(taken)], ranks, outputs=[output])
        else:
            node = ir.Node("", what, [draw(taken), draw(taken)], outputs=[output])
        values.append(output)
        nodes.append(node)
    made = [node.outputs[0] for node in nodes]
    outputs = draw(st.lists(st.sampled_from(made), unique=True, min_size=1))
    if made[-1] not in outputs:
        outputs.append(made[-1])
    inner = [output for output in made if output not in outputs]
    for output, name in zip(inner, (SUM, PARTIAL), strict=False):
        output.name = name
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=[stored],
        opset_imports={"": 24, "grok1": 1},
        name="any",
    )
    template = traced("embedding", load_golden("tiny8").config, "float32", "float32", 8)
    functions = [function.clone() for function in template.functions.values()]
    return ir.Model(graph, ir_version=11, functions=functions)


@settings(deadline=None, max_examples=150)
@given(graphs())
def test_the_parts_of_any_graph_are_the_graph(model: ir.Model) -> None:
    check(model)


def test_a_value_of_unknown_shape_does_not_cross() -> None:
    template = traced("layer", load_golden("tiny").config, "float32", "float32", 2).clone()
    for node in template.graph:
        if node.op_type == "Add" and node.outputs[0].dtype == ir.DataType.FLOAT:
            node.outputs[0].shape = None
            break
    with pytest.raises(BuildError, match=r"add_\d+ crosses.*shape is not known"):
        cut(template)
