"""The lint of TensorRT's contract passes a good graph, and each planted fault breaks one rule."""

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from export_grok.engines.trt import contract
from export_grok.engines.trt.contract import FURTHER, check_contract, faults
from export_grok.errors import BuildError
from export_grok.plugins.op import Operand
from export_grok.plugins.plugin_node import Launch, PluginNode
from export_grok.plugins.registry import plugin_nodes, specs

GROK_TEST = PluginNode(
    op="test",
    op_type="GrokTest",
    kernel="test",
    inputs=(
        Operand(name="x", shape="n K"),
        Operand(name="weight", shape="K N", dtype="int8"),
        Operand(name="scales", shape="R N", dtype="scale"),
    ),
    outputs=(Operand(name="y", shape="n N", dtype="float32"),),
    attributes={"parts": int, "cap": float},
    output_shapes=lambda call: ((call.shapes["x"][0], call.shapes["weight"][1]),),
    launch=lambda call: Launch(grid=(1, 1, 1), scalars={}, constants={}),
)

GOOD = """
<ir_version: 10, opset_import: ["": 24, "grok1": 1, "trt": 1]>
good (bfloat16[4,64] x, int8[64,32] w, float16[1,32] s, bfloat16[2,1,16,8] cache,
      bfloat16[2,1,1,8] new, int64[2] at)
  => (float[4,32] y, bfloat16[2,1,16,8] written, bfloat16[2,1,16,8] twice)
  <float[4,32] h, int64[2] shape = {4, 32}, int8[2] quantised = {1, 2}>
{
  h = grok1.GrokTest <plugin_namespace = "grok1", plugin_version = "1", parts = 2, cap = 30.0>
      (x, w, s)
  sum = trt.DistCollective <collective_operation = "all_reduce", reduce_op = "sum", nb_rank = 8>
      (h)
  more = grok1.GrokHelp (sum)
  y = Reshape (more, shape)
  written = TensorScatter <axis = 2> (cache, new, at)
  twice = Add (written, written)
}
<opset_import: ["": 24], domain: "grok1">
GrokTest <parts: int, cap: float = 1.0> (a, b, c) => (d)
{
  f = Cast <to = 1> (a)
  g = Cast <to = 1> (b)
  h = Cast <to = 1> (c)
  i = Mul (g, h)
  d = MatMul (f, i)
}
<opset_import: ["": 24], domain: "grok1">
GrokHelp (a) => (b)
{
  b = Identity (a)
}
<opset_import: ["": 24], domain: "trt">
DistCollective (a) => (b)
{
  b = Identity (a)
}
"""

Y = "y = Reshape (more, shape)"
BODY = "i = Mul (g, h)"
HELP = "b = Identity (a)"
WRITE = "written = TensorScatter <axis = 2> (cache, new, at)"
TEST = 'plugin_namespace = "grok1", plugin_version = "1", parts = 2, cap = 30.0'

# rule -> what stands in the good graph, what is planted for it, and what the fault must tell.
PLANTED = {
    "static_shapes": [
        ("bfloat16[4,64] x", "bfloat16[B,64] x", "x has shape"),
        ("bfloat16[4,64] x", "bfloat16[4,0] x", "x has shape"),
        ("(float[4,32] y", "(float[N,32] y", "y has shape"),
    ],
    "_no_branches": [
        (
            Y,
            "yes = Constant <value = bool {1}> () "
            "y = If (yes) <then_branch = t () => (float[4,32] p) { p = Identity (h) }, "
            "else_branch = e () => (float[4,32] q) { q = Neg (h) }>",
            "If -> y",
        ),
        (
            HELP,
            "yes = Constant <value = bool {1}> () "
            "b = If (yes) <then_branch = t () => (float[4,32] p) { p = Identity (a) }, "
            "else_branch = e () => (float[4,32] q) { q = Neg (a) }>",
            "If -> b in function GrokHelp",
        ),
    ],
    "_dequantises_constants": [
        (Y, "y = Reshape (more, shape) d = DequantizeLinear <axis = 1> (w, s)", "-> d"),
        (BODY, "i = DequantizeLinear (b, c)", "-> i in function GrokTest"),
    ],
    "_no_blocked_int8": [
        (
            Y,
            "y = Reshape (more, shape) "
            "d = DequantizeLinear <axis = 0, block_size = 2> (quantised, s)",
            "-> d",
        ),
    ],
    "_int8_constants_are_dequantised": [
        (Y, "d = Cast <to = 1> (quantised) y = Reshape (more, shape)", "takes quantised"),
        (
            BODY,
            "i = Mul (g, h) k = Constant <value = int8[2] {1, 2}> () j = Cast <to = 1> (k)",
            "Cast -> j in function GrokTest takes k",
        ),
        (Y, "d = grok1.GrokHelp (quantised) y = Reshape (more, shape)", "takes quantised"),
    ],
    "_no_native_names": [
        ("GrokHelp", "Gelu", "grok1::Gelu"),
        ("GrokHelp", "QMoE", "grok1::QMoE"),
        ("GrokHelp", "TRT_MatMul", "grok1::TRT_MatMul"),
        ("trt.DistCollective", "com.microsoft.DistCollective", "com.microsoft::DistC"),
        (
            Y,
            "y = com.microsoft.GroupQueryAttention (more, shape)",
            "com.microsoft::GroupQueryAttention",
        ),
    ],
    "_caches_are_bound": [
        (WRITE, "w0 = TensorScatter <axis = 2> (cache, new, at) written = Neg (w0)", "w0 is no"),
        (
            WRITE,
            "c = Neg (cache) written = TensorScatter <axis = 2> (c, new, at)",
            "its cache is no input",
        ),
        (
            WRITE,
            'written = TensorScatter <axis = 2, mode = "circular"> (cache, new, at)',
            "mode circular",
        ),
        ("Add (written, written)", "Add (written, cache)", "cache is read elsewhere"),
        (
            HELP,
            "b = Identity (a) c = TensorScatter <axis = 2> (a, a, a)",
            "-> c in function GrokHelp",
        ),
    ],
    "_attention_is_plain": [
        (
            "twice = Add (written, written)",
            "twice = Attention <softcap = 30.0> (written, written, written)",
            "softcap",
        ),
        (
            "twice = Add (written, written)",
            "twice, k = Attention (written, written, written)",
            "2 outputs",
        ),
        (
            HELP,
            "b = Attention <softcap = 30.0> (a, a, a)",
            "-> b in function GrokHelp has a softcap",
        ),
    ],
    "_plugins_are_known": [
        (TEST, TEST.replace('"grok1"', '"grok2"'), "plugin_namespace is 'grok2'"),
        (TEST, "parts = 2, cap = 30.0", "plugin_namespace is None"),
        (TEST, TEST.replace('"1"', '"2"'), "plugin_version is '2'"),
        (TEST, TEST.replace(", parts = 2", ""), "attributes are cap: FLOAT"),
        (TEST, TEST.replace("= 30.0", "= 30"), "cap: INT"),
        (TEST, TEST + ", aot = 1", "aot: INT"),
        ("(x, w, s)", "(x, w)", "inputs are 2"),
        ("(x, w, s)", "(x, , s)", "inputs are 3"),
        ("int8[64,32] w", "uint8[64,32] w", "weight is UINT8"),
        ("float16[1,32] s", "int64[1,32] s", "scales is INT64"),
        ("float[4,32] h", "bfloat16[4,32] h", "y is BFLOAT16"),
        ("h = grok1.GrokTest", "h, h2 = grok1.GrokTest", "outputs are 2"),
        ("grok1.GrokHelp (sum)", "grok1.GrokHelped (sum)", "neither a plugin nor a function"),
        (
            "grok1.GrokHelp (sum)",
            'grok1.GrokHelp <plugin_namespace = "grok1"> (sum)',
            "names a plugin",
        ),
    ],
}
CASES = [(rule, *plant) for rule, plants in PLANTED.items() for plant in plants]


@pytest.fixture(autouse=True)
def _one_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "plugin_nodes", lambda: {GROK_TEST.op_type: GROK_TEST})


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def broken(model: ir.Model) -> set[str]:
    """Return the names of the rules that the graph breaks."""
    return {rule.__name__ for rule in contract.RULES if list(rule(model))}


def test_a_good_graph_breaks_no_rule() -> None:
    onnx.checker.check_model(onnx.parser.parse_model(GOOD), full_check=True)
    check_contract(model_of(GOOD))


@pytest.mark.parametrize(("rule", "good", "planted", "told"), CASES)
def test_a_planted_fault_breaks_its_rule_and_no_other(
    rule: str, good: str, planted: str, told: str
) -> None:
    assert GOOD.count(good) >= 1
    model = model_of(GOOD.replace(good, planted))
    assert broken(model) == {rule}
    assert any(told in fault for fault in faults(model)), faults(model)


def test_every_rule_has_a_planted_fault() -> None:
    names = {rule.__name__ for rule in contract.RULES}
    assert names == {*PLANTED, "_constants_are_small"}


@pytest.mark.parametrize("kind", ["initialiser", "constant", "external"])
def test_a_weight_in_the_graph_breaks_its_rule_and_no_other(kind: str) -> None:
    model = model_of(GOOD)
    if kind == "constant":
        values = ir.tensor([1.0] * (16 << 10) + [1.0])
        model.graph.insert_before(model.graph[0], ir.node("Constant", [], {"value": values}))
    else:
        tensor = (
            ir.ExternalTensor("w.bin", 0, 8, ir.DataType.FLOAT, shape=ir.Shape([2]), name="big")
            if kind == "external"
            else ir.tensor([1.0] * (16 << 10) + [1.0], name="big")
        )
        model.graph.register_initializer(ir.Value(name="big", const_value=tensor))
    assert broken(model) == {"_constants_are_small"}


def test_a_constant_of_int8_may_be_dequantised() -> None:
    planted = Y + " d = DequantizeLinear (quantised, one)"
    constants = "int8[2] quantised = {1, 2}, float one = {1.0}"
    check_contract(
        model_of(GOOD.replace(Y, planted).replace("int8[2] quantised = {1, 2}", constants))
    )


def test_all_faults_are_told_at_once() -> None:
    text = GOOD.replace("GrokHelp", "Gelu").replace("bfloat16[4,64] x", "bfloat16[B,64] x")
    with pytest.raises(BuildError) as refused:
        check_contract(model_of(text))
    assert "'good'" in str(refused.value)
    assert "x has shape" in str(refused.value)
    assert "grok1::Gelu" in str(refused.value)


def test_names_of_ours_are_unknown_to_the_parser_and_names_ruled_out_are_known() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="asks the parser of tensorrt_rtx")
    from export_grok.engines.trt.callbacks import messages_of

    logger = messages_of(trt).logger
    network = trt.Builder(logger).create_network(1)
    parser = trt.OnnxParser(network, logger)
    assert all(parser.supports_operator(name) for name in FURTHER)
    ours = [*specs(), *plugin_nodes()]
    assert ours
    assert not [name for name in ours if parser.supports_operator(name)]
