"""Lowering replaces every op of a graph or says why not, and points at the weights' bytes."""

import itertools
from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest

from export_grok.artifacts import Bundle, graph_file
from export_grok.config import Dtype
from export_grok.engines.lowering import LoweringReport, lower_ops
from export_grok.engines.ort.lower import lower_graph
from export_grok.errors import BuildError
from export_grok.export.graphs import stamped
from export_grok.plugins.op import DOMAIN
from export_grok.plugins.registry import lowering, op_names, spec
from export_grok.weights import NUMPY_DTYPES, Weight, WeightIndex
from tests.bundles import BundleOf
from tests.conftest import FIXTURES, Golden, TemplateOf, load_golden

LINEAR, EXPERTS, ATTENTION = "GrokInt8Linear", "GrokMoeExperts", "GrokSoftcapAttention"
IN_A_LAYER = {LINEAR: 4, EXPERTS: 1, ATTENTION: 1}  # query, key, value and out are linear

NAMES = [*FIXTURES, "demo"]


def lowered_layers(bundle: Bundle) -> list[ir.Model]:
    return [
        ir.load(bundle.folder / graph_file("layer", layer, variant="ort"))
        for layer in range(bundle.config.num_layers)
    ]


def op_types(model: ir.Model) -> Counter[str]:
    """Count the op nodes of a graph and of all graphs within it."""
    return Counter(node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN)


def stored(model: ir.Model) -> list[ir.ExternalTensor]:
    """Return the stored initialisers of a graph and of all graphs within it."""
    graphs = [model.graph, *model.graph.subgraphs()]
    tensors = [value.const_value for graph in graphs for value in graph.initializers.values()]
    return [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]


def end(tensor: ir.ExternalTensor) -> int:
    return int(tensor.offset or 0) + int(tensor.length or 0)


def weight_of(index: WeightIndex, layer: int, tensor: ir.ExternalTensor) -> Weight:
    """Return the whole that an initialiser is cut from: its name goes on with `[..]`."""
    return index[f"layers.{layer}.{str(tensor.name).split('[')[0]}"]


def uncovered(start: int, length: int, parts: list[tuple[int, int]]) -> list[str]:
    """Return where the parts (first byte, end) do not tile a range of bytes exactly once."""
    faults = []
    place = start
    for first, last in sorted(parts):
        if first != place:
            faults.append(f"{'gap' if first > place else 'overlap'} at {place}")
        place = last
    return faults if place == start + length else [*faults, f"ends at {place}"]


@pytest.mark.parametrize("name", ["tiny", "tiny8", "demo"])
def test_every_op_of_every_layer_is_lowered(bundle_of: BundleOf, name: str) -> None:
    bundle = bundle_of(name)
    layers = bundle.config.num_layers
    assert bundle.manifest.lowering == {
        op: {"lowered": count * layers, "function": 0} for op, count in IN_A_LAYER.items()
    }


def test_the_head_size_of_deep13_leaves_its_attention_to_the_function_body(
    bundle_of: BundleOf,
) -> None:
    assert bundle_of("deep13").manifest.lowering == {
        LINEAR: {"lowered": 52, "function": 0},
        EXPERTS: {"lowered": 13, "function": 0},
        ATTENTION: {"lowered": 0, "function": 13},
    }


@pytest.mark.parametrize("name", NAMES)
def test_only_kept_ops_and_their_functions_remain(bundle_of: BundleOf, name: str) -> None:
    kept = {ATTENTION: 1} if name == "deep13" else {}
    for model in lowered_layers(bundle_of(name)):
        assert op_types(model) == kept
        assert {function.name for function in model.functions.values()} == set(kept)


@pytest.mark.parametrize("name", NAMES)
def test_graphs_before_lowering_keep_their_ops(bundle_of: BundleOf, name: str) -> None:
    bundle = bundle_of(name)
    for layer in range(bundle.config.num_layers):
        assert op_types(ir.load(bundle.folder / graph_file("layer", layer))) == IN_A_LAYER


def test_every_op_with_a_lowering_is_exercised(bundle_of: BundleOf) -> None:
    counts = bundle_of("tiny").manifest.lowering
    with_lowering = {spec(op).op_type for op in op_names() if lowering(op, "ort")}
    assert with_lowering == {op for op, count in counts.items() if count["lowered"]}


@pytest.mark.parametrize("name", NAMES)
def test_stored_initialisers_lie_inside_the_weight_they_are_named_after(
    bundle_of: BundleOf, name: str
) -> None:
    bundle = bundle_of(name)
    index = bundle.index()
    for layer, model in enumerate(lowered_layers(bundle)):
        tensors = stored(model)
        assert tensors
        for tensor in tensors:
            whole = weight_of(index, layer, tensor)
            assert str(tensor.location) == whole.file
            assert whole.offset <= int(tensor.offset or 0)
            assert end(tensor) <= whole.offset + whole.nbytes
            assert int(tensor.length or 0) == tensor.size * NUMPY_DTYPES[whole.dtype].itemsize
            assert tensor.dtype.numpy() == NUMPY_DTYPES[whole.dtype]


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_of_a_layers_weights_is_pointed_at_exactly_once(
    bundle_of: BundleOf, name: str
) -> None:
    bundle = bundle_of(name)
    index = bundle.index()
    for layer, model in enumerate(lowered_layers(bundle)):
        parts: dict[str, list[tuple[int, int]]] = {}
        for tensor in stored(model):
            whole = weight_of(index, layer, tensor)
            parts.setdefault(whole.name, []).append((int(tensor.offset or 0), end(tensor)))
        wanted = index.below(f"layers.{layer}.")
        assert parts.keys() == {f"layers.{layer}.{rest}" for rest in wanted}
        for rest, whole in wanted.items():
            found = uncovered(whole.offset, whole.nbytes, parts[f"layers.{layer}.{rest}"])
            assert (rest, found) == (rest, [])


@pytest.mark.parametrize("name", NAMES)
def test_each_expert_points_at_its_own_bytes(bundle_of: BundleOf, name: str) -> None:
    bundle = bundle_of(name)
    index = bundle.index()
    for layer, model in enumerate(lowered_layers(bundle)):
        tensors = stored(model)
        for matrix, part in itertools.product(("gate", "up", "down"), ("weight", "scales")):
            stem = f"experts.{matrix}.{part}"
            for expert in range(bundle.config.num_experts):
                block = index[f"layers.{layer}.{stem}"].block(expert)
                parts = [
                    (int(tensor.offset or 0), end(tensor))
                    for tensor in tensors
                    if str(tensor.name).startswith(f"{stem}[{expert}]")
                ]
                assert uncovered(block.offset, block.nbytes, parts) == []


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(10, 14), (15, 20)], id="gap"),
        pytest.param([(10, 15), (14, 20)], id="overlap"),
        pytest.param([(10, 20), (10, 20)], id="twice"),
        pytest.param([(10, 19)], id="short"),
        pytest.param([(10, 21)], id="long"),
        pytest.param([(9, 20)], id="early"),
        pytest.param([], id="none"),
    ],
)
def test_the_check_of_coverage_sees_wrong_parts(parts: list[tuple[int, int]]) -> None:
    assert uncovered(10, 10, [(10, 14), (14, 20)]) == []
    assert uncovered(10, 10, parts) != []


def test_a_template_is_not_lowered_and_the_reasons_name_its_inputs(bundle_of: BundleOf) -> None:
    model = ir.load(bundle_of("tiny").folder / graph_file("layer", variant="template"))
    report = lower_ops(model, "ort")
    assert report.kept == {LINEAR: 4, EXPERTS: 1}
    assert report.lowered == {ATTENTION: 1}
    told = "\n".join(report.reasons)
    for name in ("query", "key", "value", "out"):
        assert f"{LINEAR}: attention.{name}.weight is not a stored weight" in told
    assert f"{EXPERTS}: experts.gate.weight is not a stored weight" in told
    assert op_types(model) == {LINEAR: 4, EXPERTS: 1}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes_are_not_lowered_and_the_reasons_name_them(
    template_of: TemplateOf, dtype: Dtype
) -> None:
    golden = load_golden("tiny")
    template = template_of("tiny", "layer", dtype)
    model = stamped(template, "layer", golden.config, dtype, golden.index, layer=0)
    report = lower_ops(model, "ort")
    assert report.kept == IN_A_LAYER
    assert all(dtype.upper() in reason for reason in report.reasons)
    with pytest.raises(BuildError, match=f"{dtype}.*--dtype float32"):
        lower_graph(model, dtype=dtype)


def test_an_unknown_backend_lowers_nothing_and_says_so(bundle_of: BundleOf) -> None:
    model = ir.load(bundle_of("tiny").folder / graph_file("layer", 0))
    report = lower_ops(model, "abacus")
    assert report.kept == IN_A_LAYER
    assert not report.lowered
    assert all("no abacus lowering" in reason for reason in report.reasons)


def test_a_kept_node_is_refused_with_its_reason(golden: Golden, bundle_of: BundleOf) -> None:
    path: Path = bundle_of(golden.name).folder / graph_file("layer", 0)
    report = lower_ops(ir.load(path), "ort")
    if golden.config.key_size % 8 == 0:
        report.check()
        return
    with pytest.raises(BuildError, match=r"head_size is 4.*multiple of 8") as error:
        report.check()
    assert "--allow-functions" in str(error.value)


def test_reports_add_up_and_name_each_reason_once() -> None:
    total = LoweringReport()
    for _ in range(3):
        total.add(
            LoweringReport(lowered=Counter(a=2), kept=Counter(b=1), reasons=["b: it is odd"])
        )
    assert (total.lowered, total.kept) == ({"a": 6}, {"b": 3})
    with pytest.raises(BuildError) as error:
        total.check()
    assert str(error.value).startswith("3 op nodes")
    assert str(error.value).count("b: it is odd") == 1
    LoweringReport(lowered=Counter(a=2)).check()
