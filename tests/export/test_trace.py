"""A template is the graph of one module: small, clean, dynamic, the same each time."""

import os
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from export_grok.config import DTYPES, GROK_1, Dtype, GrokConfig
from export_grok.errors import BuildError
from export_grok.export.contract import (
    GRAPH_KINDS,
    GraphKind,
    check_contract,
    ports,
    weight_prefix,
)
from export_grok.export.graphs import write_graph
from export_grok.export.parameters import model_parameters
from export_grok.export.trace import OPSET, template_from_config
from export_grok.plugins.op import DOMAIN
from tests.conftest import TemplateOf

SIZES = {"B", "S", "T"}


def serialised(model: ir.Model) -> bytes:
    data: bytes = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    return data


@pytest.fixture(params=GRAPH_KINDS)
def kind(request: pytest.FixtureRequest) -> GraphKind:
    found: GraphKind = request.param
    return found


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> Dtype:
    found: Dtype = request.param
    return found


def test_a_layer_is_its_ops_and_no_control_flow(template_of: TemplateOf, dtype: Dtype) -> None:
    model = template_of("tiny", "layer", dtype)
    counts = Counter(node.op_type for node in model.graph.all_nodes())
    ours = {node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}
    assert {op: counts[op] for op in ours} == {
        "GrokInt8Linear": 4,
        "GrokMoeExperts": 1,
        "GrokSoftcapAttention": 1,
    }
    assert not {"If", "Loop", "Scan", "NonZero", "Compress", "Unique"} & counts.keys()
    assert {node.domain for node in model.graph.all_nodes()} == {"", DOMAIN}
    assert model.graph.opset_imports[""] == OPSET


def test_every_op_comes_with_its_body(template_of: TemplateOf, dtype: Dtype) -> None:
    model = template_of("tiny", "layer", dtype)
    bodies = {(domain, name) for domain, name, _ in model.functions}
    used = {
        (node.domain, node.op_type)
        for part in (model.graph, *model.functions.values())
        for node in part
        if node.domain
    }
    assert bodies == used


def test_a_body_stands_behind_those_it_calls(template_of: TemplateOf) -> None:
    """Readers that load functions one by one, as ONNX's own evaluator does, need this order."""
    known: set[ir.OperatorIdentifier] = set()
    for identifier, function in template_of("tiny", "layer", "float32").functions.items():
        called = {node.op_identifier() for node in function if node.domain == DOMAIN}
        assert called <= known
        known.add(identifier)


def test_a_template_is_small_and_holds_no_weights(
    template_of: TemplateOf, kind: GraphKind, dtype: Dtype
) -> None:
    model = template_of("tiny", kind, dtype)
    assert len(serialised(model)) < 20_000
    # What is stored are constants of the formulas, rotary frequencies for one.
    constants = [value.const_value for value in model.graph.initializers.values()]
    assert all(tensor is not None and tensor.size <= 64 for tensor in constants)
    assert all(value.const_value is None for value in model.graph.inputs)


def test_a_templates_inputs_are_its_ports_and_all_weights_of_its_kind(
    template_of: TemplateOf, tiny_config: GrokConfig, kind: GraphKind, dtype: Dtype
) -> None:
    values = {str(value.name): value for value in template_of("tiny", kind, dtype).graph.inputs}
    known = {row.name for row in ports(kind, tiny_config, dtype) if row.direction == "in"}
    found = {}
    for name in values.keys() - known:
        shape = values[name].shape
        assert shape is not None
        found[name] = (tuple(shape.numpy()), str(values[name].dtype))

    prefix = weight_prefix(kind, 1)
    names = {"FLOAT": "float32", "BFLOAT16": "bfloat16", "INT8": "int8"}
    wanted = {
        name.removeprefix(prefix): parameter
        for name, parameter in model_parameters(tiny_config).items()
        if (name.startswith("layers.1.") if kind == "layer" else not name.startswith("layers"))
    }
    if kind == "embedding":
        del wanted["final_norm.scale"]
    assert {name: (shape, names[kind_]) for name, (shape, kind_) in found.items()} == {
        name: (parameter.shape, parameter.dtype) for name, parameter in wanted.items()
    }


def test_batch_tokens_and_cache_are_dynamic_by_name(
    template_of: TemplateOf, tiny_config: GrokConfig, kind: GraphKind, dtype: Dtype
) -> None:
    model = template_of("tiny", kind, dtype)
    rows = {row.name: row for row in ports(kind, tiny_config, dtype)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        row = rows.get(str(value.name))
        if row is None:
            continue
        assert value.shape is not None
        axes = [axis.value if isinstance(axis, ir.SymbolicDim) else axis for axis in value.shape]
        assert axes == list(row.shape)
    used = {axis for row in rows.values() for axis in row.shape if isinstance(axis, str)}
    assert used <= SIZES


def test_no_intermediate_shape_is_that_of_the_example(
    template_of: TemplateOf, kind: GraphKind
) -> None:
    """A graph that was specialised to the example's sizes has no symbol left somewhere."""
    model = template_of("tiny", kind, "float32")
    known = [node.outputs[0].shape for node in model.graph if node.domain == DOMAIN]
    for shape in known:
        assert shape is not None
        assert any(isinstance(axis, ir.SymbolicDim) for axis in shape)


def test_two_traces_are_the_same_bytes(
    template_of: TemplateOf, tiny_config: GrokConfig, kind: GraphKind
) -> None:
    again = template_from_config(kind, tiny_config, "float32")
    assert serialised(again) == serialised(template_of("tiny", kind, "float32"))


def test_a_trace_is_the_same_bytes_in_another_process(
    template_of: TemplateOf, tiny_config: GrokConfig, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from export_grok.config import GrokConfig; "
        "from export_grok.export.graphs import write_graph; "
        "from export_grok.export.trace import template_from_config; "
        f"config = GrokConfig(**{tiny_config.to_dict()!r}); "
        "model = template_from_config('layer', config, 'float32'); "
        f"write_graph(model, Path({str(tmp_path / 'layer.onnx')!r}))"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert (tmp_path / "layer.onnx").read_bytes() == serialised(
        template_of("tiny", "layer", "float32")
    )


def test_a_template_says_nothing_of_the_machine_it_was_made_on(
    template_of: TemplateOf, kind: GraphKind, dtype: Dtype
) -> None:
    model = template_of("tiny", kind, dtype)
    data = serialised(model)
    here = [str(Path.home()), str(Path.cwd()), sys.prefix, str(Path(onnx.__file__).parents[1])]
    for trace in (b".py", b"site-packages", b"Traceback", b"File ", b"torch.nn", b"aten"):
        assert trace not in data
    for path in here:
        assert len(path) < 3 or path.encode() not in data
    assert not re.search(rb"/[A-Za-z_]+/[A-Za-z_]+/", data)
    proto = ir.serde.serialize_model(model)
    assert not proto.metadata_props
    assert not proto.graph.metadata_props
    assert not any(node.metadata_props or node.doc_string for node in proto.graph.node)
    assert not any(value.metadata_props for value in proto.graph.value_info)


def test_the_checker_finds_no_fault(
    template_of: TemplateOf, kind: GraphKind, dtype: Dtype
) -> None:
    proto = ir.serde.serialize_model(template_of("tiny", kind, dtype))
    onnx.checker.check_model(proto, full_check=True)


def test_a_layer_of_full_size_is_traced_without_its_memory() -> None:
    """Its weights would take 5 GB, and one expert's matrix in float32 800 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = template_from_config("layer", GROK_1, "bfloat16")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 1e9
    assert len(serialised(model)) < 20_000
    weights = {value.name: value.shape for value in model.graph.inputs}
    assert weights["experts.gate.weight"] == (8, 6144, 32768)


def test_a_big_embedding_is_traced_without_its_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind in ("embedding", "head"):
        template_from_config("head" if kind == "head" else "embedding", GROK_1, "float32")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 1e9


# ---- the contract


def broken(template_of: TemplateOf, kind: GraphKind = "layer") -> ir.Model:
    """Return a template to break."""
    return template_of("tiny", kind, "float32").clone()


def refusal(model: ir.Model, config: GrokConfig, kind: GraphKind = "layer") -> str:
    with pytest.raises(BuildError) as caught:
        check_contract(model, kind, config, "float32", weights=True)
    return str(caught.value)


def test_a_template_keeps_the_contract(
    template_of: TemplateOf, tiny_config: GrokConfig, kind: GraphKind, dtype: Dtype
) -> None:
    check_contract(template_of("tiny", kind, dtype), kind, tiny_config, dtype, weights=True)


def test_a_renamed_output_is_named(template_of: TemplateOf, tiny_config: GrokConfig) -> None:
    model = broken(template_of)
    model.graph.outputs[1].name = "keys"
    text = refusal(model, tiny_config)
    assert "graph 'layer' breaks its contract" in text
    assert "outputs are ['h_out', 'keys', 'v_out'], must be ['h_out', 'k_out', 'v_out']" in text


def test_another_order_of_inputs_is_named(
    template_of: TemplateOf, tiny_config: GrokConfig
) -> None:
    model = broken(template_of)
    k_cache, v_cache = model.graph.inputs[2:4]
    model.graph.inputs[2:4] = [v_cache, k_cache]
    text = refusal(model, tiny_config)
    assert "inputs are ['h', 'start', 'v_cache', 'k_cache']" in text


def test_a_missing_output_is_named(template_of: TemplateOf, tiny_config: GrokConfig) -> None:
    model = broken(template_of)
    model.graph.outputs.pop()
    assert "outputs are ['h_out', 'k_out']" in refusal(model, tiny_config)


def test_a_wrong_dtype_is_named(template_of: TemplateOf, tiny_config: GrokConfig) -> None:
    model = broken(template_of)
    model.graph.inputs[1].type = ir.TensorType(ir.DataType.INT32)
    assert "start is int32, must be int64" in refusal(model, tiny_config)


def test_a_wrong_size_is_named_with_all_other_faults(
    template_of: TemplateOf, tiny_config: GrokConfig
) -> None:
    model = broken(template_of)
    model.graph.inputs[2].shape = ir.Shape(["B", 3, "T", 16])
    model.graph.outputs[0].shape = ir.Shape(["B", "S"])
    model.graph.outputs[0].type = ir.TensorType(ir.DataType.BFLOAT16)
    text = refusal(model, tiny_config)
    assert "k_cache has shape ('B', 3, 'T', 16), must be ('B', 2, 'T', 16)" in text
    assert "h_out has shape ('B', 'S'), must be ('B', 'S', 96)" in text
    assert re.search(r"h_out is bf(loat)?16, must be float32", text)


def test_a_dynamic_axis_that_became_a_number_is_named(
    template_of: TemplateOf, tiny_config: GrokConfig
) -> None:
    """The example's batch must not stay in the graph."""
    model = broken(template_of)
    model.graph.inputs[0].shape = ir.Shape([2, "S", 96])
    assert "h has shape (2, 'S', 96), must be ('B', 'S', 96)" in refusal(model, tiny_config)


def test_a_graph_of_another_kind_is_refused(
    template_of: TemplateOf, tiny_config: GrokConfig
) -> None:
    assert "must be ['h', 'last']" in refusal(broken(template_of), tiny_config, "head")


def test_weights_left_over_as_inputs_break_the_contract_of_a_stamped_graph(
    template_of: TemplateOf, tiny_config: GrokConfig
) -> None:
    with pytest.raises(BuildError, match="inputs are"):
        check_contract(broken(template_of), "layer", tiny_config, "float32", weights=False)


def test_a_template_is_written_as_it_is(template_of: TemplateOf, tmp_path: Path) -> None:
    model = template_of("tiny", "layer", "float32")
    write_graph(model, tmp_path / "layer.onnx")
    assert (tmp_path / "layer.onnx").read_bytes() == serialised(model)
