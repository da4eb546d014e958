"""The fixtures' weights as others publish them: a writer that shares nothing with the reader.

Names and layouts are those of the programs that read such files; what they are is said in
docs/layouts.md.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.parameters import Parameter
from export_grok.export.released_layout import write_released
from export_grok.export.tensor_source import TensorSource
from export_grok.files import write_json
from export_grok.weights import WeightReader
from tests.conftest import Golden

__all__ = [
    "LAYOUTS",
    "Tensors",
    "by_rank",
    "float8",
    "floats",
    "hf_config",
    "parts_of_ranks",
    "released",
    "save_bin",
    "save_safetensors",
    "tensors",
]

Tensors = dict[str, Tensor]
LAYOUTS = ("hpcai", "keyfan", "xai")


def floats(golden: Golden) -> dict[str, NDArray[np.float32]]:
    """Return the weights that the fixture stands for: matrices [in, out], experts stacked."""
    reader = WeightReader(golden.index.root)
    found = {}
    for weight in golden.index:
        values = reader.read(weight)
        if weight.dtype == "int8":
            scales = reader.read(golden.index[f"{weight.name[: -len('weight')]}scales"])
            groups = scales.shape[-2]
            grouped = values.reshape(*values.shape[:-2], groups, -1, values.shape[-1])
            product = grouped * scales.astype(np.float32)[..., None, :]
            found[weight.name] = product.reshape(values.shape)
        elif not weight.name.endswith(".scales"):
            found[weight.name] = values
    return found


def _hpcai(layer: int, part: str, expert: int) -> str:
    block = f"model.layers.{layer}"
    return {
        "attention.query.weight": f"{block}.attn.q_proj.weight",
        "attention.key.weight": f"{block}.attn.k_proj.weight",
        "attention.value.weight": f"{block}.attn.v_proj.weight",
        "attention.out.weight": f"{block}.attn.o_proj.weight",
        "experts.gate.weight": f"{block}.moe_block.experts.{expert}.linear.weight",
        "experts.down.weight": f"{block}.moe_block.experts.{expert}.linear_1.weight",
        "experts.up.weight": f"{block}.moe_block.experts.{expert}.linear_v.weight",
        "router.weight": f"{block}.moe_block.gate.weight",
    }.get(part, f"{block}.{part}")


def _keyfan(layer: int, part: str, expert: int) -> str:
    block = f"transformer.decoder_layer.{layer}"
    norms = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
    return {
        "attention.query.weight": f"{block}.multi_head_attention.query.weight",
        "attention.key.weight": f"{block}.multi_head_attention.key.weight",
        "attention.value.weight": f"{block}.multi_head_attention.value.weight",
        "attention.out.weight": f"{block}.multi_head_attention.linear.weight",
        "experts.gate.weight": f"{block}.moe.{expert}.linear.weight",
        "experts.down.weight": f"{block}.moe.{expert}.linear_1.weight",
        "experts.up.weight": f"{block}.moe.{expert}.linear_v.weight",
        "router.weight": f"{block}.router.weight",
        **{
            f"{norm}.scale": f"{block}.rms_norm{f'_{i}' if i else ''}.weight"
            for i, norm in enumerate(norms)
        },
    }[part]


def _xai(layer: int, part: str, expert: int) -> str:
    block = f"model.layers.{layer}"
    kind, name, *_ = part.split(".")
    if kind == "attention":
        return f"{block}.self_attn.{'o' if name == 'out' else name[0]}_proj.weight"
    if kind == "experts":
        number = {"gate": 1, "down": 2, "up": 3}[name]
        return f"{block}.block_sparse_moe.experts.{expert}.w{number}.weight"
    return (
        f"{block}.block_sparse_moe.gate.weight" if kind == "router" else f"{block}.{kind}.weight"
    )


_IN_LAYER: dict[str, Callable[[int, str, int], str]] = {
    "hpcai": _hpcai,
    "keyfan": _keyfan,
    "xai": _xai,
}
_ENDS = {
    "hpcai": ("model.embed_tokens.weight", "model.norm.scale"),
    "keyfan": ("transformer.in_out_embed.weight", "transformer.rms_norm.weight"),
    "xai": ("model.embed_tokens.weight", "model.norm.weight"),
}


def tensors(
    layout: str,
    weights: Mapping[str, NDArray[np.float32]],
    dtype: torch.dtype = torch.float32,
    *,
    head: bool = False,
) -> Tensors:
    """Return the weights under the names of a layout, matrices [out, in], experts one by one."""
    embedding, norm = _ENDS[layout]
    made: dict[str, NDArray[np.float32]] = {
        embedding: weights["embedding.weight"],
        norm: weights["final_norm.scale"],
    }
    if head:
        made["lm_head.weight"] = weights["embedding.weight"].copy()
    for name, values in weights.items():
        if not name.startswith("layers."):
            continue
        _, layer, part = name.split(".", 2)
        if part.startswith("experts."):
            for expert, matrix in enumerate(values):
                made[_IN_LAYER[layout](int(layer), part, expert)] = matrix.T
        else:
            made[_IN_LAYER[layout](int(layer), part, 0)] = values.T
    return {
        name: torch.from_numpy(np.array(values, order="C")).to(dtype)
        for name, values in made.items()
    }


def float8(source: Tensors, kind: str, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensors:
    """Return the matrices in float8, with scales of one `kind`: "tensor", "row" or "block"."""
    made: Tensors = {}
    for name, tensor in source.items():
        if not any(part in name for part in ("attn.", "experts.", "attention.", ".moe.")):
            made[name] = tensor
            continue
        values, largest = tensor.float(), torch.finfo(dtype).max
        if kind == "block":
            rows, columns = values.shape
            scale = torch.zeros(-(-rows // 128), -(-columns // 128))
            spread = torch.zeros_like(values)
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    block = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                    scale[i, j] = values[block].abs().max() / largest
                    spread[block] = scale[i, j]
            made[f"{name}_scale_inv"] = scale
        else:
            sizes = values.abs()
            scale = (sizes.amax() if kind == "tensor" else sizes.amax(1)) / largest
            spread = scale if kind == "tensor" else scale[:, None]
            made[f"{name}_scale"] = scale
            made[name.replace(".weight", ".input_scale")] = torch.ones(())
        made[name] = (values / spread).to(dtype)
    return made


def parts_of_ranks(source: Tensors, ranks: int, *, only_experts: bool = False) -> list[Tensors]:
    """Return what each rank's file holds; names that all ranks have whole are in all of them."""
    made: list[Tensors] = [{} for _ in range(ranks)]
    for name, tensor in source.items():
        expert = ".experts." in name
        cut = expert or (not only_experts and ("_proj." in name or "embed" in name))
        axis = 1 if name.endswith(("o_proj.weight", "w2.weight")) else 0
        for rank in range(ranks):
            made[rank][name] = tensor.chunk(ranks, axis)[rank].clone() if cut else tensor
    return made


def by_rank(source: Tensors, ranks: int) -> tuple[Tensors, list[Tensors]]:
    """Return what is common to the ranks, and the experts' parts that each rank has."""
    parts = parts_of_ranks(source, ranks, only_experts=True)
    common = {name: tensor for name, tensor in source.items() if ".experts." not in name}
    return common, [{n: t for n, t in part.items() if n not in common} for part in parts]


def save_safetensors(
    folder: Path, source: Tensors, files: int = 1, *, index: bool = False
) -> None:
    """Write tensors to `files` safetensors files, spread over them in turn."""
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    _save(folder, source, names, "model.safetensors.index.json" if index else None, save_file)


def save_bin(folder: Path, source: Tensors, files: int = 1, *, index: bool = False) -> None:
    """Write tensors to `files` files of torch, spread over them in turn."""
    names = [f"pytorch_model-{i + 1:05}-of-{files:05}.bin" for i in range(files)]
    _save(folder, source, names, "pytorch_model.bin.index.json" if index else None, torch.save)


def _save(
    folder: Path,
    source: Tensors,
    names: list[str],
    index: str | None,
    save: Callable[[Tensors, Path], Any],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        save(dict(list(source.items())[number :: len(names)]), folder / name)
    if index:
        places = {key: names[i % len(names)] for i, key in enumerate(source)}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def hf_config(config: GrokConfig, **more: Any) -> dict[str, Any]:
    """Return the hyper-parameters as programs of others write them."""
    return {
        "architectures": ["Grok1ModelForCausalLM"],
        "model_type": "grok-1",
        "hidden_size": config.emb_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_selected_experts,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_base,
        "max_attn_value": config.attn_logit_cap,
        "attn_output_multiplier": config.attn_output_multiplier,
        "embedding_multiplier_scale": config.embedding_multiplier_scale,
        "output_multiplier_scale": config.output_multiplier_scale,
        "pad_token_id": config.pad_token,
        "bos_token_id": config.bos_token,
        "eos_token_id": config.eos_token,
        "tie_word_embeddings": True,
        "transformers_version": "4.35.0",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **more,
    }


def released(source: TensorSource, out: Path) -> Path:
    """Write the tensors of a source as a released checkpoint."""
    (out / RELEASED_FOLDER).mkdir(parents=True)
    write_json(out / "config.json", source.config.to_dict())
    for file, parameters in released_files(source.config).items():

        def blocks(key: str, parameters: dict[str, Parameter] = parameters) -> Any:
            return source.blocks(parameters[key].name)

        write_released(out / RELEASED_FOLDER / file, parameters, blocks)
    return out
