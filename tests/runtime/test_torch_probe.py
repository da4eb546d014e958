"""The reference, one module at a time: held to the original, and its taps are what they say."""

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from export_grok.config import Dtype
from export_grok.engines.probe import TAPS, GraphName
from export_grok.export.contract import ports
from export_grok.export.load import layer_from_index
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.comparison import compared
from export_grok.runtime.verify.goldens import read_goldens
from export_grok.runtime.verify.tolerances import tolerances_of
from tests.conftest import Golden, load_golden
from tests.engines.graph_inputs import inputs_of, names_of, ran

Arrays = dict[str, NDArray[Any]]

LAYER = GraphName(kind="layer", layer=1)


@functools.cache
def probe_of(name: str, dtype: Dtype = "float32") -> TorchProbe:
    golden = load_golden(name)
    return TorchProbe(golden.config, golden.index, dtype=dtype)


@functools.cache
def layer_of(name: str, dtype: Dtype = "float32") -> tuple[Arrays, Arrays]:
    """Return inputs of a layer, and what comes out."""
    probe = probe_of(name, dtype)
    inputs = inputs_of(probe.config, LAYER, 5)
    return inputs, ran(probe, LAYER, inputs)


def test_every_graph_gives_what_the_original_had_there(golden: Golden) -> None:
    probe = probe_of(golden.name)
    original = read_goldens(golden.folder / "goldens.npz", golden.config)
    (step,) = original.steps
    shape = (*step.start.shape, golden.config.num_kv_heads, 40, golden.config.key_size)
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    h = step.tokens
    for name in names_of(golden.config):
        inputs: Arrays = {"tokens": step.tokens} if name.kind == "embedding" else {"h": h}
        if name.kind == "layer":
            inputs |= {"start": step.start, "k_cache": noise, "v_cache": noise}
        if name.kind == "head":
            inputs["last"] = step.last
        with original.graph(name) as run:
            wanted = run(inputs)
        findings = compared(
            ran(probe, name, inputs), wanted, step, inputs, tolerances_of(golden.config)
        )
        assert {one.tensor for one in findings.deviations} >= wanted.keys() - {"probabilities"}
        assert [one for one in findings.deviations if not one.passed] == []
        h = wanted.get("h", wanted.get("h_out", h))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_outputs_are_those_of_the_contract_and_all_taps_in_float32(dtype: Dtype) -> None:
    probe = probe_of("tiny8", dtype)
    for name in names_of(probe.config):
        found = ran(probe, name, inputs_of(probe.config, name, 3))
        rows = [row for row in ports(name.kind, probe.config, dtype) if row.direction == "out"]
        taps = TAPS if name.kind == "layer" else ()
        assert found.keys() == {row.name for row in rows} | {*taps}
        for tensor, array in found.items():
            assert array.dtype == (np.int64 if tensor == "experts" else np.float32)


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("bfloat16", ml_dtypes.bfloat16)])
def test_in_bfloat16_no_output_has_more_bits_than_that(dtype: Dtype, numpy_dtype: Any) -> None:
    _, found = layer_of("tiny8", dtype)
    for tensor in ("h_out", "k_out", "v_out", "heads", "attention"):
        assert np.array_equal(found[tensor], found[tensor].astype(numpy_dtype).astype(np.float32))
    _, wide = layer_of("tiny8")
    assert not np.array_equal(found["h_out"], wide["h_out"])


# ---- taps


@pytest.mark.parametrize("name", ["tiny", "tiny8"])
def test_gates_are_the_probabilities_of_the_chosen_experts_and_they_the_most_probable(
    name: str,
) -> None:
    _, found = layer_of(name)
    probabilities, experts = found["probabilities"], found["experts"]
    assert probabilities.sum(axis=-1) == pytest.approx(1, abs=1e-6)
    assert np.array_equal(np.take_along_axis(probabilities, experts, axis=-1), found["gates"])
    count = experts.shape[-1]
    assert np.array_equal(found["gates"], -np.sort(-probabilities, axis=-1)[..., :count])


def normed(array: NDArray[np.float32], scale: torch.Tensor, eps: float) -> NDArray[np.float64]:
    wide = array.astype(np.float64)
    found: NDArray[np.float64] = (
        wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + eps) * scale.float().numpy()
    )
    return found


@pytest.mark.parametrize("name", ["tiny", "tiny8"])
def test_taps_are_what_their_names_say_by_the_formulas_of_the_model(name: str) -> None:
    golden = load_golden(name)
    inputs, found = layer_of(name)
    module = layer_from_index(golden.config, golden.index, 1)
    eps = golden.config.rms_norm_eps

    def close(array: NDArray[Any], wanted: NDArray[Any]) -> bool:
        return bool(np.allclose(array, wanted, rtol=1e-4, atol=1e-5))

    with torch.no_grad():
        after = module.attention.out(torch.from_numpy(found["heads"])).numpy()
    assert close(after, found["attention"])
    middle = inputs["h"] + normed(found["attention"], module.post_attn_norm.scale, eps)
    h_out = middle + normed(found["moe"], module.post_moe_norm.scale, eps)
    assert close(h_out, found["h_out"])
    before = normed(middle.astype(np.float32), module.pre_moe_norm.scale, eps).astype(np.float32)
    with torch.no_grad():
        routing = module.router(torch.from_numpy(before))
        moe = module.experts(torch.from_numpy(before), routing.gates, routing.experts).numpy()
    assert close(routing.probabilities.numpy(), found["probabilities"])
    assert close(moe, found["moe"])


# ---- what is given and taken


def test_what_is_given_stays_and_what_comes_out_is_new() -> None:
    probe = probe_of("tiny")
    inputs = inputs_of(probe.config, LAYER, 4)
    kept = {name: array.copy() for name, array in inputs.items()}
    with probe.graph(LAYER) as run:
        first = run(inputs)
        before = {name: array.copy() for name, array in first.items()}
        run({**inputs, "h": inputs["h"] + 1})
        again = run(inputs)
    assert all(np.array_equal(inputs[name], array) for name, array in kept.items())
    assert all(np.array_equal(first[name], array) for name, array in before.items())
    assert all(np.array_equal(again[name], array) for name, array in before.items())
    assert not any(
        np.shares_memory(one, other) for one in first.values() for other in inputs.values()
    )


def test_only_slots_of_new_tokens_are_written_and_none_behind_them_is_read() -> None:
    probe = probe_of("tiny")
    inputs = inputs_of(probe.config, LAYER, 4)
    poisoned = {name: array.copy() for name, array in inputs.items()}
    for name in ("k_cache", "v_cache"):
        for row, start in zip(poisoned[name], inputs["start"], strict=True):
            row[:, start:] = 1e4
    with probe.graph(LAYER) as run:
        wanted, found = run(inputs), run(poisoned)
    for name in ("h_out", *TAPS):
        assert np.array_equal(found[name], wanted[name])
    slots = np.arange(inputs["k_cache"].shape[2])
    for row, start in enumerate(inputs["start"]):
        others = (slots < start) | (slots >= start + 4)
        for cache, output in (("k_cache", "k_out"), ("v_cache", "v_out")):
            assert np.array_equal(found[output][row, :, others], poisoned[cache][row, :, others])


def test_layers_are_on_their_own_weights() -> None:
    probe = probe_of("tiny8")
    inputs = inputs_of(probe.config, LAYER, 2)
    outputs = [
        ran(probe, GraphName(kind="layer", layer=layer), inputs)["h_out"] for layer in range(3)
    ]
    assert not np.allclose(outputs[0], outputs[1])
    assert not np.allclose(outputs[1], outputs[2])
