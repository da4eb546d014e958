"""The ONNX Runtime engine computes what the original program did, by either kind of kernels."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, graph_file
from export_grok.engines.ort.graphs import session_options
from export_grok.plugins.kernels import native_kernels
from tests.bundles import BundleOf
from tests.conftest import Golden, load_golden
from tests.engines.ort.conftest import VARIANTS, OpenedOf
from tests.engines.ort.logits import (
    TOLERANCE,
    Floats,
    Ints,
    at,
    decoded,
    distance,
    fed,
    filled,
    last_logits,
    prefilled,
    tokens_of,
)


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("poison", [0.0, 1e4, np.nan])
def test_prefill_and_decode_agree_with_the_original(
    golden: Golden, opened: OpenedOf, chunk: int | None, poison: float
) -> None:
    session = filled(opened(golden.name, 2, golden.config.sequence_len), poison)
    assert distance(session, golden, chunk=chunk) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_every_instruction_set_agrees_with_the_original(
    golden: Golden, opened_by: OpenedOf, chunk: int | None
) -> None:
    session = opened_by(golden.name, 2, golden.config.sequence_len)
    assert distance(session, golden, chunk=chunk) < TOLERANCE


def test_keys_and_values_agree_with_the_original(golden: Golden, opened: OpenedOf) -> None:
    session = filled(opened(golden.name, 2, golden.config.sequence_len), 0.0)
    distance(session, golden)
    for layer, place in ((0, "first"), (-1, "last")):
        for letter, caches in (("k", session.keys), ("v", session.values)):
            wanted = golden.arrays[f"f32/kv_{place}_{letter}_after_decode"]
            found = caches[layer][:, :, : wanted.shape[1]].transpose(0, 2, 1, 3)
            assert np.abs(found - wanted).max() < TOLERANCE


def test_the_short_padded_prompt_agrees_with_the_original(
    golden: Golden, opened: OpenedOf
) -> None:
    arrays = golden.arrays
    session = filled(opened(golden.name, 1, golden.config.sequence_len), np.nan)
    short = arrays["short_tokens"].astype(np.int64)
    padded = np.pad(short, (0, 5), constant_values=golden.config.pad_token)[None]
    logits = last_logits(session, padded, at(1, 0), at(1, len(short) - 1))
    assert np.abs(logits[0] - arrays["f32/padded_logits"]).max() < TOLERANCE
    steps = decoded(
        session, arrays["f32/padded_decode_tokens"][None].astype(np.int64), after=len(short)
    )
    assert np.abs(steps[0] - arrays["f32/padded_decode_logits"]).max() < TOLERANCE


@pytest.mark.parametrize(("position", "name"), [(1, "ahead"), (-1, "behind")])
def test_a_wrong_position_is_seen(opened: OpenedOf, position: int, name: str) -> None:
    golden = load_golden("tiny8")
    session = filled(opened("tiny8", 2, golden.config.sequence_len), 0.0)
    length = tokens_of(golden).shape[1]
    prefilled(session, tokens_of(golden), chunk=length)
    steps = decoded(session, fed(golden), after=length + position)
    assert np.abs(steps - golden.arrays["f32/decode_logits"]).max() > 100 * TOLERANCE, name


def routing(
    bundle: Bundle, file: str, feeds: dict[str, NDArray[Any]], folder: Path
) -> tuple[Floats, Ints, Floats]:
    """Run a layer whose choice of experts is an output too: gates, experts, h_out."""
    model = onnx.load(bundle.folder / file, load_external_data=False)
    (top,) = [node for node in model.graph.node if node.op_type == "TopK"]
    for name, kind in zip(
        top.output, (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64), strict=True
    ):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    path = folder / "layer.onnx"
    onnx.save(model, path)
    options = session_options(bundle.weights_root, None, native_kernels())
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    gates, experts, hidden = session.run([*top.output, "h_out"], feeds)
    return gates, experts, hidden


def test_every_layer_chooses_the_experts_of_the_original(
    golden: Golden, kernels: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle, arrays, config = bundle_of(golden.name), golden.arrays, golden.config
    rows, length = arrays["tokens"].shape
    for layer in range(config.num_layers):
        empty = np.zeros((rows, config.num_kv_heads, length, config.key_size), np.float32)
        feeds = {
            "h": arrays["f32/hidden"][:, layer],
            "start": at(rows, 0),
            "k_cache": empty,
            "v_cache": empty.copy(),
        }
        file = graph_file("layer", layer, variant=VARIANTS[kernels])
        gates, experts, hidden = routing(bundle, file, feeds, tmp_path)
        assert (experts == arrays["f32/expert_index"][:, layer]).all()
        assert np.abs(gates - arrays["f32/expert_gate"][:, layer]).max() < 2e-5
        assert np.abs(hidden - arrays["f32/hidden"][:, layer + 1]).max() < TOLERANCE
