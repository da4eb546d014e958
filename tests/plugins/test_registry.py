"""Every folder of an op is found, and one op has one signature wherever it is written down."""

import inspect
import subprocess
import sys

import onnx
import onnx.defs
import onnx_ir as ir
import pytest
import torch
from onnx.defs import OpSchema

from export_grok.config import GrokConfig
from export_grok.plugins.onnx_schema import attach_functions, register_schemas, translation_table
from export_grok.plugins.op import DOMAIN, VERSION, OpSpec
from export_grok.plugins.registry import (
    lowering,
    op_names,
    part,
    plugin_nodes,
    spec,
    specs,
)
from tests.bundles import traced
from tests.conftest import TemplateOf

OPS = op_names()
KINDS = {int: onnx.AttributeProto.INT, float: onnx.AttributeProto.FLOAT}
TORCH_KINDS = {int: "int", float: "float"}


def arguments(found: OpSpec) -> list[str]:
    return [operand.name for operand in found.inputs] + list(found.attributes)


def test_the_ops_are_the_folders() -> None:
    assert OPS == ("all_reduce", "int8_linear", "moe_experts", "softcap_attention")
    assert [spec(op).name for op in OPS] == list(OPS)
    assert {found.name: op_type for op_type, found in specs().items()} == {
        op: spec(op).op_type for op in OPS
    }


@pytest.mark.parametrize("op", OPS)
def test_no_op_has_the_type_of_a_standard_op(op: str) -> None:
    taken = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain != DOMAIN}
    assert spec(op).op_type not in taken


@pytest.mark.parametrize("op", OPS)
def test_an_alias_joins_an_output_with_an_input_of_its_shape(op: str) -> None:
    found = spec(op)
    inputs = {operand.name: operand for operand in found.inputs}
    outputs = {operand.name: operand for operand in found.outputs}
    for output, source in found.aliases.items():
        assert outputs[output].shape == inputs[source].shape
        assert outputs[output].dtype == inputs[source].dtype


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        *((op, "ort") for op in OPS if op != "all_reduce"),  # it runs in one process
        *((op, "trt") for op in OPS),
    ],
)
def test_every_op_has_a_lowering_for_every_backend(op: str, backend: str) -> None:
    module = lowering(op, backend)
    assert module is not None
    assert list(inspect.signature(module.lower).parameters) == ["node", "graph", "tape"]


def test_an_op_without_a_lowering_is_left_to_its_function() -> None:
    assert lowering("int8_linear", "abacus") is None


@pytest.mark.parametrize("op", OPS)
def test_torch_op_has_the_signature_of_the_spec(op: str) -> None:
    found = spec(op)
    part(op, "reference")
    schema = getattr(getattr(torch.ops, DOMAIN), op).default._schema
    assert [argument.name for argument in schema.arguments] == arguments(found)
    assert len(schema.returns) == len(found.outputs)
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    assert {name: kinds[name] for name in found.attributes} == {
        name: TORCH_KINDS[kind] for name, kind in found.attributes.items()
    }


@pytest.mark.parametrize("op", OPS)
def test_onnx_schema_has_the_signature_of_the_spec(op: str) -> None:
    found = spec(op)
    register_schemas()
    schema = onnx.defs.get_schema(found.op_type, VERSION, DOMAIN)
    assert [parameter.name for parameter in schema.inputs] == [o.name for o in found.inputs]
    assert [parameter.name for parameter in schema.outputs] == [o.name for o in found.outputs]
    assert {name: kind.type for name, kind in schema.attributes.items()} == {
        name: {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT}[kind]
        for name, kind in found.attributes.items()
    }
    assert all(attribute.required for attribute in schema.attributes.values())


@pytest.mark.parametrize("op", OPS)
def test_function_body_has_the_signature_of_the_spec(op: str) -> None:
    found = spec(op)
    functions = [body.to_function_proto() for body in part(op, "onnx_function").FUNCTIONS]
    assert {function.domain for function in functions} == {DOMAIN}
    named = {function.name: function for function in functions}
    body = named.pop(found.op_type)
    assert not named.keys() & specs().keys()  # the others only help
    assert list(body.input) == [operand.name for operand in found.inputs]
    assert len(body.output) == len(found.outputs)
    assert list(body.attribute) == list(found.attributes)
    assert not body.attribute_proto  # defaults
    for function in functions:
        for node in function.node:
            assert node.domain == "" or node.op_type in named


@pytest.mark.parametrize("op_type", plugin_nodes())
def test_function_of_a_plugin_node_has_its_signature(op_type: str) -> None:
    node = plugin_nodes()[op_type]
    bodies = [body.to_function_proto() for body in part(node.op, "trt_function").FUNCTIONS]
    (body,) = [body for body in bodies if body.name == op_type]
    assert body.domain == DOMAIN
    assert list(body.input) == [operand.name for operand in node.inputs]
    assert len(body.output) == len(node.outputs)
    assert sorted(body.attribute) == sorted(node.attributes)
    assert not body.attribute_proto  # defaults


@pytest.mark.parametrize("op", OPS)
def test_emitted_node_has_the_signature_of_the_spec(op: str) -> None:
    translate = part(op, "onnx_function").translate
    assert list(inspect.signature(translate).parameters) == arguments(spec(op))
    assert translate in translation_table().values()


@pytest.fixture(scope="module")
def layer_of_ranks(tiny_config: GrokConfig) -> ir.Model:
    """Return the template of a layer that two ranks share. Clone it to change it."""
    return traced("layer", tiny_config, "float32", tensor_parallel=2)


def test_nodes_in_a_traced_graph_have_the_signature_of_the_spec(layer_of_ranks: ir.Model) -> None:
    nodes = [node for node in layer_of_ranks.graph if node.domain == DOMAIN]
    assert {node.op_type for node in nodes} == specs().keys()
    for node in nodes:
        found = specs()[node.op_type]
        assert len(node.inputs) == len(found.inputs)
        assert None not in node.inputs
        assert len(node.outputs) == len(found.outputs)
        assert {name: kind.type.value for name, kind in node.attributes.items()} == {
            name: KINDS[kind] for name, kind in found.attributes.items()
        }


def test_only_ops_that_a_graph_uses_get_their_bodies(
    layer_of_ranks: ir.Model, template_of: TemplateOf
) -> None:
    def bodies(model: ir.Model) -> set[str]:
        model.functions.clear()
        attach_functions(model)
        return {name for _, name, _ in model.functions} & specs().keys()

    model = layer_of_ranks.clone()
    assert bodies(model) == specs().keys()
    for node in [node for node in model.graph if node.op_type == "GrokMoeExperts"]:
        node.op_type = "Other"
    assert bodies(model) == specs().keys() - {"GrokMoeExperts"}
    one_rank = template_of("tiny", "layer", "float32").clone()
    assert bodies(one_rank) == specs().keys() - {"GrokAllReduce"}
    assert bodies(template_of("tiny", "embedding", "float32").clone()) == set()


def test_asking_for_signatures_loads_neither_torch_nor_onnx() -> None:
    code = (
        "import sys; from export_grok.plugins.registry import specs; specs(); "
        "sys.exit(bool({'torch', 'onnx', 'onnx_ir', 'onnxscript'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
