"""A GGUF file says what the checkpoint says, to a reader that knows nothing of the writer."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from export_grok.config import GrokConfig
from export_grok.errors import ConfigError
from export_grok.export.head import quantised
from export_grok.export.weights_to import gguf
from export_grok.export.weights_to.options import WeightDtype
from export_grok.export.weights_to.values import Rows, rows_of_matrix
from export_grok.weights import WeightIndex, WeightReader
from tests.conftest import load_golden
from tests.export.weights_to.expected import Model, floats, matrices, turned
from tests.export.weights_to.gguf_reader import GgufFile, Q8Tensor, read_gguf

NAMES = {
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.out": "attn_output",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
    "router": "ffn_gate_inp",
    "pre_attn_norm": "attn_norm",
    "post_attn_norm": "attn_output_norm",
    "pre_moe_norm": "ffn_norm",
    "post_moe_norm": "layer_output_norm",
}


def written(model: Model, out: Path, **options: Any) -> GgufFile:
    config, index = model
    files = gguf.gguf_files(config, index, name="model", **options)
    for file in files:
        file.write(out / file.name, lambda done: None)
        assert file.is_whole(out / file.name)
    parts = [read_gguf(out / file.name) for file in files]
    return GgufFile(parts[-1].keys, {n: t for part in parts for n, t in part.tensors.items()})


def check_floats(file: GgufFile, config: GrokConfig, index: WeightIndex) -> None:
    """Hold norms and routers to the checkpoint."""
    assert np.array_equal(file.tensors["output_norm.weight"], floats(index, "final_norm.scale"))
    for layer in range(config.num_layers):
        for name, key in (("router", "weight"), *((n, "scale") for n in NAMES if "norm" in n)):
            found = file.tensors[f"blk.{layer}.{NAMES[name]}.weight"]
            assert np.array_equal(found, floats(index, f"layers.{layer}.{name}.{key}")), name


def check_int8(file: GgufFile, config: GrokConfig, index: WeightIndex) -> None:
    """Hold the codes and scales of all matrices to the checkpoint."""
    reader = WeightReader(index.root)
    for layer, name in matrices(config):
        found = file.tensors[f"blk.{layer}.{NAMES[name]}.weight"]
        assert isinstance(found, Q8Tensor)
        codes = reader.read(index[f"layers.{layer}.{name}.weight"])
        assert np.array_equal(found.codes, np.swapaxes(codes, -1, -2)), name
        values = found.codes * np.repeat(found.scales.astype(np.float32), 32, axis=-1)
        assert np.array_equal(values, turned(index, f"layers.{layer}.{name}")), name


def test_as_int8_codes_and_scales_are_those_of_the_checkpoint(
    model: Model, tmp_path: Path
) -> None:
    file = written(model, tmp_path)
    check_int8(file, *model)
    check_floats(file, *model)
    embedding = file.tensors["token_embd.weight"]
    assert np.array_equal(embedding, floats(model[1], "embedding.weight"))
    assert len(file.tensors) == 2 + 12 * model[0].num_layers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["tiny", "tiny8"])
def test_as_floats_values_are_rounded_once(name: str, dtype: WeightDtype, tmp_path: Path) -> None:
    golden = load_golden(name)
    file = written((golden.config, golden.index), tmp_path, dtype=dtype)
    check_floats(file, golden.config, golden.index)
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for layer, matrix in matrices(golden.config):
        found = file.tensors[f"blk.{layer}.{NAMES[matrix]}.weight"]
        assert isinstance(found, np.ndarray)
        assert found.dtype == numpy_dtype
        exact = turned(golden.index, f"layers.{layer}.{matrix}")
        assert np.array_equal(found, exact.astype(numpy_dtype)), matrix


def untransposed(index: WeightIndex, name: str, *expert: int) -> Any:
    for rows in rows_of_matrix(index, name, *expert):
        square = rows.codes.shape[0] == rows.codes.shape[1]
        yield (
            dataclasses.replace(rows, codes=np.ascontiguousarray(rows.codes.T)) if square else rows
        )


def experts_backwards(index: WeightIndex, name: str, *expert: int) -> Any:
    experts = index[f"{name}.weight"].shape[0]
    return rows_of_matrix(index, name, *(experts - 1 - number for number in expert))


def groups_backwards(index: WeightIndex, name: str, *expert: int) -> Any:
    for rows in rows_of_matrix(index, name, *expert):
        yield Rows(codes=rows.codes, scales=rows.scales[:, ::-1])


def layers_sorted(index: WeightIndex, name: str, *expert: int) -> Any:
    _, layer, rest = name.split(".", 2)
    other = sorted(range(12), key=str)[int(layer)]
    return rows_of_matrix(index, f"layers.{other}.{rest}", *expert)


@pytest.mark.parametrize(
    "mistake", [untransposed, experts_backwards, groups_backwards, layers_sorted]
)
def test_a_mistake_in_a_matrix_is_seen(
    mistake: Callable[..., Any],
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gguf, "rows_of_matrix", mistake)
    with pytest.raises(AssertionError):
        check_int8(written(model, tmp_path), *model)


def test_a_norm_by_the_name_of_another_is_seen(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = dict(zip(gguf._NORMS, reversed(gguf._NORMS.values()), strict=True))
    monkeypatch.setattr(gguf, "_NORMS", norms)
    with pytest.raises(AssertionError):
        check_floats(written(model, tmp_path), *model)


def test_the_keys_are_what_llama_cpp_asks_for(model: Model, tmp_path: Path) -> None:
    config = model[0]
    keys = written(model, tmp_path, identity="who").keys
    assert keys["general.architecture"] == "grok"
    assert keys["tokenizer.ggml.model"] == "no_vocab"
    assert keys["export_grok.source"] == "who"
    counts = {
        "block_count": config.num_layers,
        "embedding_length": config.emb_size,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_q_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.key_size,
        "rope.dimension_count": config.key_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_selected_experts,
        "context_length": config.sequence_len,
        "vocab_size": config.vocab_size,
    }
    factors = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.output_scale": config.attn_output_multiplier,
        "attn_logit_softcapping": config.attn_logit_cap,
        "embedding_scale": config.embedding_multiplier_scale,
        "logit_scale": config.output_multiplier_scale,
        "rope.freq_base": config.rope_base,
    }
    assert {name: keys[f"grok.{name}"] for name in counts} == counts
    assert {name: keys[f"grok.{name}"] for name in factors} == pytest.approx(factors)


def test_a_reader_that_caps_the_router_changes_nothing(model: Model, tmp_path: Path) -> None:
    cap = np.float32(written(model, tmp_path).keys["grok.router_logit_softcapping"])
    logits = np.linspace(-40, 40, 1001, dtype=np.float32)
    np.testing.assert_allclose(cap * np.tanh(logits / cap), logits, rtol=1e-6)


def test_split_the_files_hold_what_one_holds(model: Model, tmp_path: Path) -> None:
    config, index = model
    whole = written(model, tmp_path)
    parts = gguf.gguf_files(config, index, name="model", split=True)
    assert [file.name for file in parts] == [
        *(f"model-{number:05}-of-00013.gguf" for number in range(2, 14)),
        "model-00001-of-00013.gguf",  # the one that is loaded: without it the others are not
    ]
    found = written(model, tmp_path, split=True)
    for part in parts:
        keys = read_gguf(tmp_path / part.name).keys
        assert keys["split.no"] == int(part.name[6:11]) - 1
        assert keys["split.count"] == 13
        assert keys["split.tensors.count"] == len(whole.tensors)
    split_keys = {name for name in found.keys if name.startswith("split.")}
    assert {n: v for n, v in found.keys.items() if n not in split_keys} == whole.keys
    assert found.tensors.keys() == whole.tensors.keys()
    check_int8(found, *model)


def test_an_int8_head_is_the_engines_own(model: Model, tmp_path: Path) -> None:
    found = written(model, tmp_path, head="int8").tensors["token_embd.weight"]
    assert isinstance(found, Q8Tensor)
    codes, scales = quantised(floats(model[1], "embedding.weight"))
    assert np.array_equal(found.codes, codes.T)
    assert np.array_equal(found.scales, np.repeat(scales[:, None], 2, axis=1).astype(np.float16))


def test_a_model_that_does_not_fit_is_refused() -> None:
    demo = GrokConfig.from_file(Path(gguf.__file__).parents[1] / "demo_model" / "config.json")
    with pytest.raises(ConfigError, match=r"384 wide; .* the embedding, 192: write --to hf"):
        gguf.check_gguf(demo, "float32", "float32")
    tiny8 = load_golden("tiny8").config
    with pytest.raises(ConfigError, match=r"attention out has 16 rows .*expert down has 27 rows"):
        gguf.check_gguf(tiny8, "int8", "float32")
    gguf.check_gguf(tiny8, "bfloat16", "int8")
    narrow = dataclasses.replace(load_golden("tiny").config, emb_size=48, key_size=8)
    with pytest.raises(ConfigError, match=r"48 wide, no multiple of 32: take --head float32"):
        gguf.check_gguf(narrow, "float32", "int8")
