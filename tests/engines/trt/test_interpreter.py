"""The graphs behind plans, interpreted on a CPU, give what PyTorch gives, and mistakes show.

Of TensorRT it proves nothing; what goes into its builder, and what a session does around plans, is
what runs here: lowered graphs, cut weights, pieces and padding, caches in place.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from export_grok.artifacts import Bundle, graph_file
from export_grok.config import Dtype, HeadDtype, Sums
from export_grok.engines.backend import open_interpreter
from export_grok.engines.ort.graphs import load_graph
from export_grok.engines.probe import TAPS, GraphName, Probe
from export_grok.engines.trt import interpreter, twin
from export_grok.engines.trt.graphs import recipe, static_graphs
from export_grok.engines.trt.host import HostDevice
from export_grok.engines.trt.lower import lower_template
from export_grok.engines.trt.record import Sizes
from export_grok.errors import BundleError, ConfigError
from export_grok.export.contract import GRAPH_KINDS
from export_grok.export.graphs import write_graph
from export_grok.export.head import write_head
from export_grok.export.partition import part_of
from export_grok.runtime.torch_probe import TorchProbe
from tests.bundles import traced
from tests.conftest import load_golden
from tests.engines.graph_inputs import (
    SLOTS,
    Arrays,
    distances,
    inputs_of,
    names_of,
    ran,
    written,
)
from tests.engines.trt.records import bundle_with, record_for

EMBEDDING, LAYER = GraphName(kind="embedding"), GraphName(kind="layer", layer=1)
# More rows and slots than the inputs have, and chunks that their tokens are no multiple of.
SIZES = Sizes(batch=4, chunk=4, max_length=40)
TOKENS = (9, 1)
CLOSE, FAR = 1e-5, 1e-3

pytestmark = pytest.mark.usefixtures("traced_once")

_built: dict[tuple[object, ...], Bundle] = {}
BundleFor = Callable[..., Bundle]


@pytest.fixture(scope="module")
def bundle_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BundleFor]:
    """Return the way to a shared bundle of tiny8 as a build leaves it, but for the plans."""

    def build(
        dtype: Dtype = "bfloat16",
        *,
        ranks: int = 1,
        head: HeadDtype = "float32",
        sums: Sums = "plan",
    ) -> Bundle:
        golden, folder = load_golden("tiny8"), tmp_path_factory.mktemp("plans")
        sizes = dataclasses.replace(SIZES, tensor_parallel=ranks)
        record = record_for(golden.config, sizes, dtype, head=head)
        bundle = bundle_with(record, "tiny8", folder, dtype, int8_head=head == "int8")
        if head == "int8":
            write_head(golden.config, golden.index, folder)
        for kind in GRAPH_KINDS:
            template = traced(kind, golden.config, dtype, head)
            write_graph(template, folder / graph_file(kind, variant="template"))
        (folder / "trt").mkdir()
        static = static_graphs(bundle, sizes, sums)
        for graph in static:
            write_graph(graph.model, folder / graph.record.file)
        record = dataclasses.replace(
            record, graphs=tuple(graph.record for graph in static), recipe=recipe(), sums=sums
        )
        manifest = dataclasses.replace(bundle.manifest, engine=record.to_dict())
        return dataclasses.replace(bundle, manifest=manifest)

    def shared(*args: object, **asked: object) -> Bundle:
        key = (*args, *sorted(asked.items()))
        if key not in _built:
            _built[key] = build(*args, **asked)  # type: ignore[arg-type]
        return _built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("export_grok.export.trace.template_from_config", traced)
        yield shared
    _built.clear()


def differences(probe: Probe, bundle: Bundle, name: GraphName, tokens: int) -> dict[str, float]:
    """Return how far all that a graph shows is from PyTorch, where tokens were written."""
    inputs = inputs_of(bundle.config, name, tokens)
    found, wanted = ran(probe, name, inputs), ran(TorchProbe.of_bundle(bundle), name, inputs)
    assert {key: (array.shape, array.dtype) for key, array in found.items()} == {
        key: (array.shape, array.dtype) for key, array in wanted.items()
    }
    return distances(*(clean(arrays, tokens) for arrays in (found, wanted)))


def clean(arrays: Arrays, tokens: int) -> Arrays:
    """Return of the caches the slots that were written; else the arrays as they are."""
    slots = written(tokens)
    return {
        name: array.transpose(0, 2, 1, 3)[slots] if name in ("k_out", "v_out") else array
        for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    "asked",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"dtype": "bfloat16", "head": "int8"},
        {"dtype": "bfloat16", "ranks": 2},
        {"dtype": "bfloat16", "ranks": 2, "sums": "between"},
    ],
    ids=lambda asked: "-".join(map(str, asked.values())),
)
def test_every_graph_shows_what_pytorch_computes(
    asked: dict[str, object], bundle_for: BundleFor
) -> None:
    bundle = bundle_for(**asked)
    probe = open_interpreter(bundle, threads=1)
    assert probe.dtype == "float32"
    assert "interpreted in float32 by ONNX Runtime" in probe.name
    assert ("of 2 ranks" in probe.name) == ("ranks" in asked)
    heads_only = "head" in asked
    for graph in names_of(bundle.config):
        if heads_only and not graph.kind.startswith("head"):
            continue
        for tokens in TOKENS:
            far = differences(probe, bundle, graph, tokens)
            assert far.pop("experts", 0) == 0
            assert max(far.values()) < CLOSE, (str(graph), tokens, far)
            assert graph.kind != "layer" or far.keys() >= set(TAPS) - {"experts"}


def test_slots_are_left_alone_but_for_new_tokens(bundle_for: BundleFor) -> None:
    bundle = bundle_for(ranks=2)
    probe = open_interpreter(bundle, threads=1)
    for tokens in TOKENS:
        inputs = inputs_of(bundle.config, LAYER, tokens)
        kept = {name: array.copy() for name, array in inputs.items()}
        found = ran(probe, LAYER, inputs)
        for cache, output in (("k_cache", "k_out"), ("v_cache", "v_out")):
            assert np.array_equal(inputs[cache], kept[cache])
            old, new = (array.transpose(0, 2, 1, 3) for array in (inputs[cache], found[output]))
            assert np.array_equal(old[~written(tokens)], new[~written(tokens)])


def test_graphs_are_loaded_once_and_their_memory_goes_with_the_block(
    bundle_for: BundleFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, loads, devices = bundle_for(), [], []

    def counted(*args: object, **options: object) -> object:
        loads.append(args)
        return load_graph(*args, **options)  # type: ignore[arg-type]

    class Seen(HostDevice):
        def __init__(self) -> None:
            super().__init__()
            devices.append(weakref.ref(self))

    monkeypatch.setattr(interpreter, "load_graph", counted)
    monkeypatch.setattr(interpreter, "HostDevice", Seen)
    probe = open_interpreter(bundle, threads=1)
    for layer in range(bundle.config.num_layers):
        name = GraphName(kind="layer", layer=layer)
        with probe.graph(name) as run:
            run(inputs_of(bundle.config, name, 4))
            assert devices[-1]() is not None
    assert len(loads) == 2  # one for each phase
    assert [device() for device in devices] == [None] * len(devices)


# ---- planted mistakes


def a_higher_cap(model: ir.Model) -> None:
    for node in model.graph:
        if "cap" in node.attributes:
            node.attributes["cap"] = ir.AttrFloat32("cap", 300.0)
    cap = model.graph.initializers.get("grok1.attention_cap")
    if cap is not None:
        cap.const_value = ir.tensor(np.float32(300.0))


def gate_for_up(model: ir.Model) -> None:
    inputs = {value.name: value for value in model.graph.inputs}
    for what in ("weight", "scales"):
        gate, up = inputs[f"experts.gate.{what}"], inputs[f"experts.up.{what}"]
        gate.name, up.name = up.name, gate.name


def caches_swapped(model: ir.Model) -> None:
    outputs = {value.name: value for value in model.graph.outputs}
    outputs["k_out"].name, outputs["v_out"].name = "v_out", "k_out"


def a_norm_left_out(model: ir.Model) -> None:
    for node in list(model.graph):
        names = [value.name for value in node.inputs if value is not None]
        if "post_moe_norm.scale" in names and node.inputs[0] is not None:
            node.outputs[0].replace_all_uses_with(node.inputs[0])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (a_higher_cap, "heads"),
        (gate_for_up, "moe"),
        (caches_swapped, "k_out"),
        (a_norm_left_out, "h_out"),
    ],
)
def test_a_mistake_of_the_lowering_shows_where_it_is(
    change: Callable[[ir.Model], None],
    where: str,
    ranks: int,
    bundle_for: BundleFor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = bundle_for(ranks=ranks)

    def wrong(template: ir.Model, kind: str, *others: object) -> ir.Model:
        model = lower_template(template, kind, *others)  # type: ignore[arg-type]
        if kind == "layer":
            change(model)
        return model

    monkeypatch.setattr(twin, "lower_template", wrong)
    monkeypatch.setattr(twin, "GRAPH_KINDS", ("layer",))
    probe = open_interpreter(bundle, threads=1)
    for tokens in (9, 1):
        assert differences(probe, bundle, LAYER, tokens)[where] > FAR


@pytest.mark.parametrize("graph", [LAYER, EMBEDDING], ids=str)
def test_ranks_that_take_the_part_of_another_show(
    graph: GraphName, bundle_for: BundleFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_for(ranks=2)
    monkeypatch.setattr(
        interpreter, "part_of", lambda whole, axis, rank, ranks: part_of(whole, axis, 0, ranks)
    )
    probe = open_interpreter(bundle, threads=1)
    assert max(differences(probe, bundle, graph, 9).values()) > FAR


# ---- refused


def test_graphs_that_are_not_those_made_now_are_refused(
    bundle_for: BundleFor, tmp_path: Path
) -> None:
    bundle = bundle_for()
    moved = dataclasses.replace(bundle, folder=tmp_path)
    for path in bundle.folder.rglob("*.onnx"):
        (tmp_path / path.relative_to(bundle.folder)).parent.mkdir(exist_ok=True)
        (tmp_path / path.relative_to(bundle.folder)).write_bytes(path.read_bytes())
    path = tmp_path / "trt" / "layer.decode.onnx"
    model = ir.load(path)
    a_higher_cap(model)
    write_graph(model, path)
    with pytest.raises(BundleError, match=r"not those that are made here.*build the engine again"):
        open_interpreter(moved)


def test_a_record_of_other_cuts_is_refused(bundle_for: BundleFor) -> None:
    bundle = bundle_for(ranks=2)
    engine = bundle.manifest.engine
    graphs = [
        {**graph, "bindings": [{**row, "cut": None} for row in graph["bindings"]]}
        for graph in engine["graphs"]
    ]
    manifest = dataclasses.replace(bundle.manifest, engine={**engine, "graphs": graphs})
    with pytest.raises(BundleError, match="build the engine again"):
        open_interpreter(dataclasses.replace(bundle, manifest=manifest))


def test_an_engine_that_runs_here_is_not_interpreted(bundle_for: BundleFor) -> None:
    bundle = bundle_for()
    manifest = dataclasses.replace(bundle.manifest, backend="ort")
    with pytest.raises(ConfigError, match=r"the ort engine in .* runs here"):
        open_interpreter(dataclasses.replace(bundle, manifest=manifest))


def test_more_rows_than_the_plans_have_are_refused(bundle_for: BundleFor) -> None:
    bundle = bundle_for()
    inputs = inputs_of(bundle.config, LAYER, 1)
    more = {name: np.concatenate([array, array]) for name, array in inputs.items()}
    assert inputs["k_cache"].shape[2] == SLOTS
    with pytest.raises(ConfigError, match="a batch of 4; 6 rows are given"):
        ran(open_interpreter(bundle, threads=1), LAYER, more)


def test_memory_beyond_a_buffer_is_none() -> None:
    device = HostDevice()
    address = device.allocate(256)
    assert address % 256 == 0
    with pytest.raises(AssertionError, match="no 8 bytes"):
        device.clear(address + 249, 8)
