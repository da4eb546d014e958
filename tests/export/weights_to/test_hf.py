"""Safetensors by a peer's names hold the checkpoint's values, as the safetensors package reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from export_grok.artifacts import TOKENIZER
from export_grok.config import GROK_1, Dtype
from export_grok.export.layouts import foreign_source
from export_grok.export.weights_to import hf
from export_grok.export.weights_to.hf_config import config_of_peer, differences
from export_grok.export.weights_to.options import NAMINGS, Naming
from export_grok.export.weights_to.values import rows_of_matrix
from export_grok.weights import WeightIndex, WeightReader
from tests.conftest import load_golden
from tests.export.weights_to.expected import NORMS, Model, floats, matrices, turned

# Each peer's names, written down from its program. In a layer: {l}, of an expert: {e}.
EXPERTS = {"gate": "linear", "up": "linear_v", "down": "linear_1"}
LLAMA = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
PEERS: dict[Naming, dict[str, str]] = {
    "hpcai": {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.scale",
        "router": "model.layers.{l}.moe_block.gate.weight",
        **{f"attention.{a}": f"model.layers.{{l}}.attn.{b}.weight" for a, b in LLAMA.items()},
        **{
            f"experts.{a}": f"model.layers.{{l}}.moe_block.experts.{{e}}.{b}.weight"
            for a, b in EXPERTS.items()
        },
        **{norm: f"model.layers.{{l}}.{norm}.scale" for norm in NORMS},
    },
    "keyfan": {
        "embedding": "transformer.in_out_embed.weight",
        "final_norm": "transformer.rms_norm.weight",
        "router": "transformer.decoder_layer.{l}.router.weight",
        **{
            f"attention.{a}": f"transformer.decoder_layer.{{l}}.multi_head_attention.{b}.weight"
            for a, b in {"query": "query", "key": "key", "value": "value", "out": "linear"}.items()
        },
        **{
            f"experts.{a}": f"transformer.decoder_layer.{{l}}.moe.{{e}}.{b}.weight"
            for a, b in EXPERTS.items()
        },
        **{
            norm: f"transformer.decoder_layer.{{l}}.rms_norm{end}.weight"
            for norm, end in zip(NORMS, ("", "_1", "_2", "_3"), strict=True)
        },
    },
    "sglang": {
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "router": "model.layers.{l}.block_sparse_moe.gate.weight",
        **{f"attention.{a}": f"model.layers.{{l}}.self_attn.{b}.weight" for a, b in LLAMA.items()},
        **{
            f"experts.{a}": f"model.layers.{{l}}.block_sparse_moe.experts.{{e}}.{b}.weight"
            for a, b in {"gate": "w1", "down": "w2", "up": "w3"}.items()
        },
        **{norm: f"model.layers.{{l}}.{norm}.weight" for norm in NORMS},
    },
}
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def written(model: Model, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    config, index = model
    for file in hf.hf_files(config, index, **options):
        file.write(out / file.name, lambda done: None)
        assert file.is_whole(out / file.name)
    tensors: dict[str, torch.Tensor] = {}
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for path in sorted(out.glob("*.safetensors")):
        found = load_file(path)
        assert not found.keys() & tensors.keys()
        assert dict.fromkeys(found, path.name).items() <= weight_map.items()
        tensors |= found
    assert tensors.keys() == weight_map.keys()
    return tensors


def check(tensors: dict[str, torch.Tensor], names: Naming, dtype: Dtype, model: Model) -> None:
    """Hold every tensor to the checkpoint, and leave none over."""
    config, index = model
    wanted: dict[str, tuple[np.ndarray[Any, Any], Dtype]] = {}
    peer = PEERS[names]
    embedding = floats(index, "embedding.weight")
    wanted[peer["embedding"]] = embedding, dtype
    if names == "sglang":
        wanted["lm_head.weight"] = embedding, dtype
    wanted[peer["final_norm"]] = floats(index, "final_norm.scale"), "float32"
    for layer in range(config.num_layers):
        for name, key in (("router", "weight"), *((norm, "scale") for norm in NORMS)):
            values = floats(index, f"layers.{layer}.{name}.{key}")
            wanted[peer[name].format(l=layer)] = values, "float32"
    for layer, name in matrices(config):
        values = turned(index, f"layers.{layer}.{name}")
        if name.startswith("experts"):
            for expert, matrix in enumerate(values):
                wanted[peer[name].format(l=layer, e=expert)] = matrix, dtype
        else:
            wanted[peer[name].format(l=layer)] = values, dtype
    assert tensors.keys() == wanted.keys()
    for name, (exact, kind) in wanted.items():
        right = torch.from_numpy(np.array(exact, order="C")).to(TORCH[kind])
        assert tensors[name].dtype == right.dtype
        assert torch.equal(tensors[name], right), name


@pytest.mark.parametrize("names", NAMINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tensor_is_there_by_its_name_rounded_once(
    names: Naming, dtype: Dtype, tmp_path: Path
) -> None:
    golden = load_golden("tiny8")
    model = golden.config, golden.index
    check(written(model, tmp_path, names=names, dtype=dtype), names, dtype, model)


def test_a_layer_has_its_own_number(model: Model, tmp_path: Path) -> None:
    check(written(model, tmp_path, dtype="float32"), "hpcai", "float32", model)
    layer = load_file(tmp_path / "model-00012-of-00013.safetensors")
    assert {name.split(".")[2] for name in layer} == {"10"}


def experts_backwards(index: WeightIndex, name: str, *expert: int) -> Any:
    experts = index[f"{name}.weight"].shape[0]
    return rows_of_matrix(index, name, *(experts - 1 - number for number in expert))


def gate_and_up_exchanged(index: WeightIndex, name: str, *expert: int) -> Any:
    other = {"gate": "up", "up": "gate"}
    head, _, part = name.rpartition(".")
    return rows_of_matrix(index, f"{head}.{other.get(part, part)}", *expert)


@pytest.mark.parametrize("mistake", [experts_backwards, gate_and_up_exchanged])
def test_a_mistake_in_a_matrix_is_seen(
    mistake: Callable[..., Any],
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hf, "rows_of_matrix", mistake)
    with pytest.raises(AssertionError):
        check(written(model, tmp_path, dtype="float32"), "hpcai", "float32", model)


@pytest.mark.parametrize("names", NAMINGS)
@pytest.mark.parametrize("name", ["tiny", "deep13"])
def test_read_back_it_is_the_checkpoint(names: Naming, name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    written((golden.config, golden.index), tmp_path, names=names, dtype="float32")
    source = foreign_source(tmp_path)
    assert source.config == golden.config
    reader = WeightReader(golden.index.root)
    for weight in golden.index:
        found = b"".join(bytes(block) for block in source.blocks(weight.name))
        assert found == reader.read(weight).tobytes(), weight.name


def test_the_index_comes_last_and_counts_the_tensors(model: Model, tmp_path: Path) -> None:
    config, index = model
    files = hf.hf_files(config, index)
    assert files[-1].name == "model.safetensors.index.json"
    total = json.loads(files[-1].header)["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for file in files for tensor in file.tensors)


def test_the_tokenizer_comes_along(model: Model, tmp_path: Path) -> None:
    (tmp_path / TOKENIZER).write_bytes(b"pieces")
    files = {file.name: file for file in hf.hf_files(*model, tokenizer=tmp_path / TOKENIZER)}
    assert files[TOKENIZER].header == b"pieces"


def test_the_config_chooses_the_peers_program() -> None:
    hpcai, keyfan, sglang = (config_of_peer(GROK_1, names, "bfloat16") for names in NAMINGS)
    assert hpcai["architectures"] == ["Grok1ModelForCausalLM"]
    assert (hpcai["num_experts"], hpcai["max_attn_value"]) == (8, 30.0)
    assert keyfan["architectures"] == ["GrokForCausalLM"]
    assert keyfan["hidden_act"] == "gelu_pytorch_tanh"
    assert sglang["architectures"] == ["Grok1ForCausalLM"]
    assert (sglang["num_local_experts"], sglang["head_dim"]) == (8, 128)
    assert not sglang["tie_word_embeddings"]
    assert not sglang["load_presharded_moe"]
    for config in (hpcai, keyfan, sglang):
        assert config["rope_theta"] == 10000.0
        assert (config["hidden_size"], config["intermediate_size"]) == (6144, 32768)


def test_what_a_peer_cannot_be_told_is_said() -> None:
    assert not any(differences(GROK_1, names) for names in NAMINGS)
    tiny = load_golden("tiny").config
    (note,) = differences(tiny, "sglang")
    assert "0.25, whatever the config says; here it is 0.2225" in note
    assert differences(tiny, "keyfan") == ()
