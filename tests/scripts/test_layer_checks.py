"""The checks of a layer's plan, on a fake GPU whose plan is the PyTorch layer: right and wrong."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import Dtype
from export_grok.engines.trt.engine import Engine
from export_grok.engines.trt.record import Binding, GraphRecord, Phase, Sizes
from scripts.gpu import layer
from scripts.gpu.layer import LayerCase, Reference, graph_of, random_layer, written_graph
from scripts.gpu.layer_capture import LAYERS, capture, moved_by_layer
from scripts.gpu.layer_checks import BOUND, Found, in_place, reformats, row_errors, values
from scripts.gpu.layer_steps import outcome
from scripts.gpu.plan_run import built_plan, flavour_here
from scripts.gpu.step import Options
from tests.bundles import traced
from tests.conftest import load_golden
from tests.engines.trt.fake_device import Compute, FakeEngine, FakeRuntime, torch_model
from tests.engines.trt.records import record_for
from tests.scripts.fake_gpu import MILLISECONDS, FakeGpu

Array = NDArray[Any]
Change = Callable[[list[Array]], Sequence[Array]]

CONFIG = replace(load_golden("tiny").config, num_layers=1)
SIZES = Sizes(batch=3, chunk=5, max_length=40)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share traces with other modules of tests."""
    tiny = load_golden("tiny").config
    monkeypatch.setattr(layer, "_template", lambda _config, dtype: traced("layer", tiny, dtype))


def case_of(phase: Phase = "decode", dtype: Dtype = "float32") -> LayerCase:
    return LayerCase(name="tiny", config=CONFIG, sizes=SIZES, phase=phase, dtype=dtype)


@dataclass
class Fake:
    """A fake GPU, and what builds fake plans of a layer for it."""

    gpu: FakeGpu
    change: Change = lambda outputs: outputs
    told: Callable[[Binding], Binding | None] = lambda binding: binding

    def build(self, case: LayerCase) -> Engine:
        right = torch_model(CONFIG, case.dtype)

        def compute(graph: GraphRecord) -> Compute:
            run = right(graph)
            return lambda inputs: self.change(list(run(copied(inputs))))

        runtime = FakeRuntime(
            device=self.gpu,
            record=record_for(CONFIG, SIZES, case.dtype),
            compute=compute,
            change=self.told,
        )
        return FakeEngine(runtime, graph_of(case))


def copied(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs of which a plan that is wrong may write one: nothing is in place here."""
    return {name: array.copy() for name, array in inputs.items()}


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def values_of(fake: Fake, case: LayerCase) -> Found:
    return values(fake.gpu, case, fake.build, random(), Reference(case))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_right_layer_has_the_reference_s_values(phase: Phase) -> None:
    found = values_of(Fake(FakeGpu()), case_of(phase))
    assert found.faults == []
    assert 0 < found.figures["h_out"] < BOUND["float32"] / 10
    assert 0 < found.figures["tokens"] <= found.figures["of"]


def test_bfloat16_is_within_its_bound_and_the_bound_is_near() -> None:
    found = values_of(Fake(FakeGpu()), case_of("prefill", "bfloat16"))
    assert found.faults == []
    assert BOUND["bfloat16"] / 20 < found.figures["h_out"] < BOUND["bfloat16"]


def test_one_wrong_token_is_noticed() -> None:
    def wrong(outputs: list[Array]) -> list[Array]:
        outputs[0][...] *= 1 + 1e-3
        return outputs

    found = values_of(Fake(FakeGpu(), change=wrong), case_of())
    assert len(found.faults) == 1
    assert "h_out of tiny decode, float32 is off by 0.001" in found.faults[0]


def test_wrong_new_keys_are_noticed() -> None:
    def other(outputs: list[Array]) -> list[Array]:
        outputs[1][...] = np.roll(outputs[1], 1, axis=-1)
        return outputs

    found = values_of(Fake(FakeGpu(), change=other), case_of())
    assert any(fault.startswith("k_out") for fault in found.faults)


def test_no_number_is_no_small_error() -> None:
    def none(outputs: list[Array]) -> list[Array]:
        outputs[0][...] = np.nan
        return outputs

    found = values_of(Fake(FakeGpu(), change=none), case_of())
    assert found.figures["h_out"] == np.inf
    assert found.faults


def test_tokens_whose_router_has_a_near_tie_do_not_count() -> None:
    case = case_of()
    inputs = random_layer(case, random())
    inputs["router.weight"][:] = 0  # all experts are alike
    _, clear = Reference(case).run(inputs)
    assert clear.shape == (SIZES.batch, 1)
    assert not clear.any()


def test_an_error_is_relative_to_the_token_s_length() -> None:
    expected = np.array([[3.0, 4.0], [30.0, 40.0]])
    found = expected + np.array([0.0, 0.5])
    np.testing.assert_allclose(row_errors(found, expected), [0.1, 0.01])


# ---- caches


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_new_slots_alone_are_written_where_the_cache_lies(phase: Phase) -> None:
    fake = Fake(FakeGpu())
    assert in_place(fake.gpu, case_of(phase), fake.build, random()).faults == []
    addresses = fake.gpu.runs[-1].addresses
    assert addresses["k_cache"] == addresses["k_out"]
    assert addresses["v_cache"] == addresses["v_out"]


def test_an_element_beside_the_new_ones_is_noticed() -> None:
    def spill(outputs: list[Array]) -> list[Array]:
        outputs[1][0, 0, 0, 0] += 1
        return outputs

    fake = Fake(FakeGpu(), change=spill)
    found = in_place(fake.gpu, case_of(), fake.build, random())
    assert found.faults == ["tiny decode, float32: 1 elements of k_cache beside the new ones"]


def test_caches_that_are_not_written_are_noticed() -> None:
    def nothing(outputs: list[Array]) -> list[Array]:
        return [outputs[0], *(np.full_like(cache, np.nan) for cache in outputs[1:])]

    fake = Fake(FakeGpu(), change=nothing)
    found = in_place(fake.gpu, case_of(), fake.build, random())
    assert any("new elements of v_cache are not written" in fault for fault in found.faults)


def test_a_plan_that_tells_no_alias_is_noticed() -> None:
    fake = Fake(FakeGpu(), told=lambda row: replace(row, aliases=None))
    found = in_place(fake.gpu, case_of(), fake.build, random())
    assert "tiny decode, float32: k_out aliases None, not k_cache" in found.faults


# ---- formats

INFORMATION = {
    "Layers": [
        {"Name": "conv", "LayerType": "PluginV3", "Inputs": [{"Name": "experts.up.weight"}]},
        {
            "Name": "Reformatting CopyNode for Input Tensor 0 to x",
            "LayerType": "Reformat",
            "Inputs": [{"Name": "h"}],
        },
        {"Name": "n", "LayerType": "Reformat", "Inputs": [{"Name": "attention.query.weight"}]},
        "a name alone, as at a lower verbosity",
    ],
    "Bindings": ["h"],
}


def test_a_copy_of_a_weight_is_found_among_the_reformats() -> None:
    weights = ["experts.up.weight", "attention.query.weight"]
    assert reformats(INFORMATION, weights) == (["n of attention.query.weight"], 2)
    assert reformats(INFORMATION, weights[:1]) == ([], 2)


# ---- capture


def captured(fake: Fake) -> Found:
    case = case_of(dtype="bfloat16")
    return capture(fake.gpu, case, fake.build, random(), lambda: 1e6, samples=1)


def test_replays_equal_plain_runs_and_are_timed_by_the_layer() -> None:
    """And 64 layers have caches of their own, and hand on the residual stream."""
    fake = Fake(FakeGpu())
    found = captured(fake)
    assert found.faults == []
    for layers in (1, LAYERS):
        figures = found.figures[str(layers)]
        assert figures["layer_us"] == pytest.approx(1e3 * MILLISECONDS / LAYERS)
        moved = figures["bytes"]
        assert figures["share"] == pytest.approx(moved / (MILLISECONDS / LAYERS) / 1e6)
    last = [run.addresses for run in fake.gpu.runs[-LAYERS:]]
    assert len({addresses["k_cache"] for addresses in last}) == LAYERS
    assert len({addresses["attention.query.weight"] for addresses in last}) == 1
    for before, after in itertools.pairwise(last):
        assert before["h_out"] == after["h"]


def test_a_replay_that_differs_is_noticed() -> None:
    count = iter(range(10_000))

    def drifting(outputs: list[Array]) -> list[Array]:
        outputs[0][...] += 0.25 * next(count)
        return outputs

    found = captured(Fake(FakeGpu(), change=drifting))
    assert found.faults[0] == "tiny decode, bfloat16: h_out of 1 layers differ when replayed"


def test_a_layer_s_bytes_are_those_of_the_chosen_experts_and_of_seen_slots() -> None:
    case = replace(case_of(), sizes=replace(SIZES, batch=1))
    inputs = {"start": np.array([9])}
    rows = [row for row in graph_of(case).bindings if not row.aliases]
    sizes = {
        row.name: int(np.prod(row.shape))
        * {"int8": 1, "bfloat16": 2, "int64": 8}.get(row.dtype, 4)
        for row in rows
    }
    experts = sum(size for name, size in sizes.items() if name.startswith("experts."))
    caches = sizes["k_cache"] + sizes["v_cache"]
    chosen = CONFIG.num_selected_experts / CONFIG.num_experts
    wanted = sum(sizes.values()) - experts * (1 - chosen) - caches * (1 - 10 / SIZES.slots)
    assert moved_by_layer(rows, inputs, case) == pytest.approx(wanted)


# ---- plans


def test_a_plan_is_built_once_for_all_steps(tmp_path: Path) -> None:
    """By TensorRT-RTX, which needs no GPU."""
    pytest.importorskip("tensorrt_rtx")
    flavour = flavour_here(Options(folder=str(tmp_path), backend="trt-rtx"))
    plan = built_plan(flavour, written_graph(case_of(), tmp_path), 89)
    made = plan.stat()
    assert made.st_size > 0
    again = built_plan(flavour, written_graph(case_of(), tmp_path), 89)
    assert (again, again.stat().st_mtime_ns) == (plan, made.st_mtime_ns)


# ---- the outcome of a step


def test_one_fault_fails_the_step() -> None:
    right, wrong = Found(figures={"h_out": 1e-6}), Found(faults=["h_out is off"])
    cases = [case_of("decode"), case_of("prefill")]
    found = outcome(dict(zip(cases, (right, wrong), strict=True)), "all well")
    assert (found.status, found.text) == ("fail", "h_out is off")
    found = outcome({cases[0]: right}, "all well")
    assert (found.status, found.text) == ("pass", "1 plans: all well")
    assert outcome({}, "all well").status == "fail", "nothing was checked"
