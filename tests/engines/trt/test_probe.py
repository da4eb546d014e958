"""One graph of plans at a time gives what PyTorch gives, whatever it is cut into and padded to.

All of it runs on a fake device whose plans are the PyTorch model: it proves addresses, pieces,
padding and dtypes, and nothing of TensorRT.
"""

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from export_grok.config import Dtype
from export_grok.engines.probe import GraphName
from export_grok.engines.trt.probe import TrtProbe, open_probe
from export_grok.engines.trt.record import Sizes
from export_grok.engines.trt.tensors import ELEMENTS, binding_of, size_of
from export_grok.engines.trt_rtx.probe import open_probe as open_rtx
from export_grok.errors import BundleError, CheckpointError, ConfigError
from export_grok.export.head import write_head
from export_grok.runtime.torch_probe import TorchProbe
from tests.conftest import load_golden
from tests.engines.graph_inputs import (
    SLOTS,
    START,
    Arrays,
    distances,
    inputs_of,
    names_of,
    ran,
    written,
)
from tests.engines.trt.fake_device import FakeDevice, FakeRuntime, torch_model
from tests.engines.trt.records import bundle_with, record_for

LAYER = GraphName(kind="layer", layer=1)
# More rows and slots than the inputs have, and chunks that their tokens are no multiple of.
SIZES = Sizes(batch=4, chunk=4, max_length=40)


class Fakes:
    """Fake devices, one after the other, and what loads plans for the one that is there.

    Attributes:
        probe: that runs on them.
        runtime: whose plans are the PyTorch model.
    """

    def __init__(
        self,
        folder: Path,
        sizes: Sizes = SIZES,
        dtype: Dtype = "float32",
        *,
        int8_head: bool = False,
        sm: int = 90,
        version: str = "1.2.3",
    ) -> None:
        config = load_golden("tiny8").config
        record = record_for(config, sizes, dtype, head="int8" if int8_head else "float32")
        self.record = record
        self.bundle = bundle_with(record, "tiny8", folder, dtype, int8_head=int8_head)
        self._sm = sm
        self.runtime = FakeRuntime(
            device=FakeDevice(sm=sm),
            record=record,
            compute=torch_model(config, dtype),
            version=version,
        )
        self.probe = TrtProbe(self.bundle, record, devices=self.next, runtime=self.runtime)

    def next(self) -> FakeDevice:
        self.runtime.device = FakeDevice(sm=self._sm)
        return self.runtime.device

    @property
    def device(self) -> FakeDevice:
        return self.runtime.device


FakesOf = Callable[..., Fakes]


@pytest.fixture
def fakes_of(tmp_path: Path) -> FakesOf:
    """Return the way to a probe on fake devices."""
    return lambda *args, **asked: Fakes(tmp_path / "bundle", *args, **asked)


def by_torch(fakes: Fakes, name: GraphName, inputs: Arrays) -> Arrays:
    """Return the outputs, without taps."""
    found = ran(TorchProbe.of_bundle(fakes.bundle, fakes.probe.dtype), name, inputs)
    outputs = ("h", "h_out", "k_out", "v_out", "logits")
    return {name: found[name] for name in outputs if name in found}


def clean(name: str, array: np.ndarray, tokens: int) -> np.ndarray:
    """Return of a cache the slots that were written; else the array as it is."""
    return array.transpose(0, 2, 1, 3)[written(tokens)] if name in ("k_out", "v_out") else array


@pytest.mark.parametrize("chunk", [2, 4, 64])
def test_fake_plans_give_the_outputs_of_pytorch(chunk: int, fakes_of: FakesOf) -> None:
    fakes = fakes_of(dataclasses.replace(SIZES, chunk=chunk))
    for graph in names_of(fakes.probe.config):
        with fakes.probe.graph(graph) as run:
            for tokens in (9, 1, 4):  # one after the other: nothing is left of the one before
                inputs = inputs_of(fakes.probe.config, graph, tokens)
                found, wanted = run(inputs), by_torch(fakes, graph, inputs)
                assert found.keys() == wanted.keys()
                for name, array in found.items():
                    assert array.shape == wanted[name].shape
                    assert array.dtype == np.float32
                far = distances(
                    *({k: clean(k, v, tokens) for k, v in x.items()} for x in (found, wanted))
                )
                assert max(far.values()) < 1e-5, (str(graph), tokens, far)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fake_plans_round_inputs_to_their_dtype_and_outputs_keep_every_bit(
    dtype: Dtype, fakes_of: FakesOf
) -> None:
    fakes = fakes_of(dtype=dtype)
    narrow = ELEMENTS[dtype]
    for graph in (GraphName(kind="embedding"), LAYER, GraphName(kind="head")):
        for tokens in (9, 1):
            inputs = inputs_of(fakes.probe.config, graph, tokens)
            found, wanted = ran(fakes.probe, graph, inputs), by_torch(fakes, graph, inputs)
            rounded = {
                name: array.astype(narrow).astype(np.float32) if array.dtype.kind == "f" else array
                for name, array in inputs.items()
            }
            again = ran(fakes.probe, graph, rounded)
            for name, array in found.items():
                assert np.array_equal(array, again[name])
                assert np.array_equal(array, array.astype(narrow).astype(np.float32))
                left, right = (clean(name, x, tokens) for x in (array, wanted[name]))
                # Now and then a sum of other lengths falls on the other side of a rounding.
                assert np.abs(left - right).mean() < 2e-4 * np.abs(right).mean()


def test_fake_plans_of_an_int8_head_read_its_own_weights(
    fakes_of: FakesOf, tmp_path: Path
) -> None:
    golden = load_golden("tiny8")
    (tmp_path / "bundle").mkdir()
    write_head(golden.config, golden.index, tmp_path / "bundle")
    fakes = fakes_of(int8_head=True)
    for graph in (GraphName(kind="head"), GraphName(kind="head_all")):
        inputs = inputs_of(golden.config, graph, 9)
        far = distances(ran(fakes.probe, graph, inputs), by_torch(fakes, graph, inputs))
        assert max(far.values()) < 1e-5


@pytest.mark.parametrize("tokens", [9, 1])
def test_what_is_given_stays_and_what_comes_out_is_new(tokens: int, fakes_of: FakesOf) -> None:
    probe = fakes_of().probe
    inputs = inputs_of(probe.config, LAYER, tokens)
    inputs["k_cache"] = np.asfortranarray(inputs["k_cache"])
    kept = {name: array.copy() for name, array in inputs.items()}
    with probe.graph(LAYER) as run:
        first = run(inputs)
        before = {name: array.copy() for name, array in first.items()}
        run({**inputs, "h": inputs["h"] + 1})
    assert all(np.array_equal(inputs[name], array) for name, array in kept.items())
    assert all(np.array_equal(first[name], array) for name, array in before.items())


@pytest.mark.parametrize("tokens", [9, 1])
def test_slots_are_left_alone_but_for_new_tokens_and_padding_is_not_shown(
    tokens: int, fakes_of: FakesOf
) -> None:
    probe = fakes_of().probe
    inputs = inputs_of(probe.config, LAYER, tokens)
    found = ran(probe, LAYER, inputs)
    for cache, output in (("k_cache", "k_out"), ("v_cache", "v_out")):
        old, new = (array.transpose(0, 2, 1, 3) for array in (inputs[cache], found[output]))
        assert np.array_equal(old[~written(tokens)], new[~written(tokens)])
        assert (old[written(tokens)] != new[written(tokens)]).mean() > 0.99


def test_a_cache_is_bound_as_input_and_output_and_a_piece_to_its_row(fakes_of: FakesOf) -> None:
    fakes = fakes_of()
    with fakes.probe.graph(LAYER) as run:
        run(inputs_of(fakes.probe.config, LAYER, 1))
        run(inputs_of(fakes.probe.config, LAYER, 9))
        whole, *pieces = fakes.device.runs
        assert [row.phase for row in pieces] == ["prefill"] * 3 * len(START)
        graph = next(
            row for row in fakes.record.graphs if (row.kind, row.phase) == ("layer", "prefill")
        )
        length = size_of(binding_of(graph, "k_cache"))
        for number, piece in enumerate(pieces):
            for letter in "kv":
                first = whole.addresses[f"{letter}_cache"]
                assert piece.addresses[f"{letter}_cache"] == first + number // 3 * length
                assert piece.addresses[f"{letter}_out"] == piece.addresses[f"{letter}_cache"]


def test_the_head_runs_for_the_piece_that_is_asked_for_only(fakes_of: FakesOf) -> None:
    fakes, name = fakes_of(), GraphName(kind="head")
    with fakes.probe.graph(name) as run:
        run(inputs_of(fakes.probe.config, name, 9))
        assert len(fakes.device.runs) == len(START)


def test_a_row_has_room_up_to_the_last_slot(fakes_of: FakesOf) -> None:
    """The padding of its last piece too, which goes beyond the longest row."""
    fakes = fakes_of(dataclasses.replace(SIZES, max_length=SLOTS))
    inputs = inputs_of(fakes.probe.config, LAYER, 9) | {"start": np.full(3, SLOTS - 9)}
    found, wanted = ran(fakes.probe, LAYER, inputs), by_torch(fakes, LAYER, inputs)
    assert max(distances(found, wanted).values()) < 1e-5


# ---- what is loaded, and for how long


@pytest.mark.parametrize("graph", [*names_of(load_golden("tiny8").config)], ids=str)
def test_a_graph_loads_its_own_plans_and_weights_only(graph: GraphName, fakes_of: FakesOf) -> None:
    fakes, golden = fakes_of(), load_golden("tiny8")
    names = {"embedding": ["embedding.weight"], "layer": [f"layers.{graph.layer}."]}
    wanted = names.get(graph.kind, ["embedding.weight", "final_norm.scale"])
    weights = sum(
        weight.nbytes for weight in golden.index if weight.name.startswith(tuple(wanted))
    )
    with fakes.probe.graph(graph) as run:
        run(inputs_of(golden.config, graph, 1))
        run(inputs_of(golden.config, graph, 3))
        assert {row.kind for row in fakes.device.runs} == {graph.kind}
        assert fakes.device.log.count("deserialise") == 2
        bindings = [
            row
            for found in fakes.record.graphs
            if found.kind == graph.kind
            for row in found.bindings
            if row.weight is None and row.aliases is None
        ]
        # Inputs and outputs of both phases, of which one cache, and what plans work in.
        caches = [row for row in bindings if row.name in ("k_cache", "v_cache")]
        once = sum(map(size_of, bindings)) - sum(map(size_of, caches[2:]))
        assert fakes.device.allocated == weights + once + fakes.runtime.scratch


def test_memory_goes_at_the_end_of_the_block_whoever_keeps_the_run(fakes_of: FakesOf) -> None:
    fakes = fakes_of()
    with fakes.probe.graph(LAYER) as run:
        run(inputs_of(fakes.probe.config, LAYER, 3))
        device = weakref.ref(fakes.device)
    fakes.next()
    assert device() is None
    with pytest.raises(IndexError):
        run({})


# ---- refused


def test_more_rows_or_slots_than_the_plans_have_are_refused_with_both_numbers(
    fakes_of: FakesOf,
) -> None:
    fakes = fakes_of(Sizes(batch=2, chunk=4, max_length=SLOTS - 1))
    for tokens in (1, 5):
        with (
            pytest.raises(
                ConfigError,
                match=r"(?s)a batch of 2; 3 rows.*up to 19 tokens; the caches have 20 slots.*--b",
            ),
            fakes.probe.graph(LAYER) as run,
        ):
            run(inputs_of(fakes.probe.config, LAYER, tokens))
    assert not fakes.device.runs


def test_plans_of_ranks_are_refused_before_a_gpu_is_looked_for(tmp_path: Path) -> None:
    sizes = Sizes(tensor_parallel=2, batch=2, chunk=4, max_length=16)
    bundle = bundle_with(record_for(load_golden("tiny8").config, sizes), "tiny8", tmp_path)
    for opener in (open_probe, open_rtx):
        with pytest.raises(ConfigError, match=r"are for 2 ranks.*--no-graphs.*--interpret"):
            opener(bundle)


def test_plans_of_another_gpu_or_version_are_refused_before_any_is_loaded(
    fakes_of: FakesOf,
) -> None:
    with pytest.raises(ConfigError, match=r"for SM90; FakeGPU is SM80"):
        fakes_of(sm=80)
    with pytest.raises(ConfigError, match=r"installed is 9.9"):
        fakes_of(version="9.9")


def test_a_plan_of_another_graph_is_refused(fakes_of: FakesOf) -> None:
    fakes = fakes_of()
    fakes.runtime.change = lambda row: dataclasses.replace(row, shape=(*row.shape[:-1], 3))
    with pytest.raises(BundleError, match="is not the plan of"), fakes.probe.graph(LAYER):
        pass


def test_weights_that_are_gone_are_named(fakes_of: FakesOf, tmp_path: Path) -> None:
    fakes = fakes_of()
    moved = dataclasses.replace(fakes.bundle, weights_root=tmp_path)
    probe = TrtProbe(moved, fakes.record, devices=fakes.next, runtime=fakes.runtime)
    with pytest.raises(CheckpointError, match=str(tmp_path)), probe.graph(LAYER):
        pass
