"""The weights as GGUF files of architecture `grok`, for llama.cpp.

As int8 (Q8_0) the codes are ours. So are the scales: float16 has more digits than their bfloat16,
and loses only very small ones. Names and keys are those of `conversion/grok.py` and
`src/models/grok.cpp` of ggml-org/llama.cpp.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig, HeadDtype
from export_grok.errors import ConfigError
from export_grok.export.head import quantised
from export_grok.export.weights_to import gguf_format as gguf
from export_grok.export.weights_to.options import WeightDtype
from export_grok.export.weights_to.plan import PlannedFile, PlannedTensor
from export_grok.export.weights_to.tokenizer import tokenizer_keys
from export_grok.export.weights_to.values import Rows, rounded, rows_of_floats, rows_of_matrix
from export_grok.weights import WeightIndex

__all__ = ["check_gguf", "gguf_files"]

# Our parameters by the names of llama.cpp.
_NORMS = {
    "attn_norm": "pre_attn_norm",
    "attn_output_norm": "post_attn_norm",
    "ffn_norm": "pre_moe_norm",
    "layer_output_norm": "post_moe_norm",
}
_MATRICES = {
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.out",
    "ffn_gate_exps": "experts.gate",
    "ffn_up_exps": "experts.up",
    "ffn_down_exps": "experts.down",
}
_DTYPES: dict[WeightDtype, str] = {
    "int8": "Q8_0",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
}
# What `general.file_type` calls a file whose matrices are of this type.
_FILE_TYPES: dict[WeightDtype, int] = {"int8": 7, "bfloat16": 32, "float16": 1, "float32": 0}
QUANTISATION_VERSION = 2

# Ports cap the router's logits at 30, which the original does not. A reader that obeys this key
# changes no float32 by so high a cap.
NO_CAP = 1e6


def check_gguf(config: GrokConfig, dtype: WeightDtype, head: HeadDtype) -> None:
    """Refuse what llama.cpp cannot load.

    Raises:
        ConfigError: the shapes do not fit it, or its blocks of int8.
    """
    faults = []
    if config.q_size != config.emb_size:
        faults.append(
            f"{config.num_q_heads} query heads of {config.key_size} are {config.q_size} wide; in "
            f"llama.cpp's grok they must be as wide as the embedding, {config.emb_size}: write "
            "--to hf"
        )
    groups = {
        "embedding": config.emb_size,
        "attention out": config.q_size // config.row_parallel_scale_groups,
        "expert down": config.ffn_size // config.row_parallel_scale_groups,
    }
    if dtype == "int8":
        faults += [
            f"{name} has {rows} rows under one scale; blocks of {gguf.BLOCK} do not fit in: take "
            "--dtype bfloat16"
            for name, rows in groups.items()
            if rows % gguf.BLOCK
        ]
    elif head == "int8" and config.emb_size % gguf.BLOCK:
        faults.append(
            f"the embedding is {config.emb_size} wide, no multiple of {gguf.BLOCK}: take --head "
            "float32"
        )
    if faults:
        raise ConfigError("; ".join(faults))


def gguf_files(
    config: GrokConfig,
    index: WeightIndex,
    *,
    name: str,
    dtype: WeightDtype = "int8",
    head: HeadDtype = "float32",
    split: bool = False,
    identity: str = "",
    tokenizer: Path | None = None,
) -> list[PlannedFile]:
    """Return the files of a model, in the order in which they are to be written.

    Args:
        config: of the model.
        index: where its weights lie.
        name: of the file, without `.gguf`.
        dtype: of the matrices. Norms and router are float32.
        head: the embedding, and head, as float32 or as the int8 codes of `export.head`.
        split: a file for each layer. The one with the keys, which llama.cpp is given, is written
            last: without it the others do not load.
        identity: of the weights; stands in every file.
        tokenizer: its file, if there is one.

    Raises:
        CheckpointError: the tokenizer is damaged, or that of another model.
        ConfigError: llama.cpp cannot load such a model.
    """
    check_gguf(config, dtype, head)
    keys = _keys(config, dtype, tokenizer) | {"export_grok.source": gguf.string(identity)}
    parts = [[_embedding(index, head), _floats("output_norm", index, "final_norm.scale")]]
    parts += [list(_layer(index, layer, dtype)) for layer in range(config.num_layers)]
    if not split:
        return [_file(f"{name}.gguf", keys, [tensor for part in parts for tensor in part])]
    files = []
    for number, tensors in enumerate(parts):
        split_keys = {
            "split.no": gguf.uint16(number),
            "split.count": gguf.uint16(len(parts)),
            "split.tensors.count": gguf.int32(sum(map(len, parts))),
            "export_grok.source": gguf.string(identity),
        }
        file = f"{name}-{number + 1:05}-of-{len(parts):05}.gguf"
        files.append(_file(file, split_keys if number else keys | split_keys, tensors))
    return [*files[1:], files[0]]


def _file(name: str, keys: dict[str, bytes], tensors: Sequence[PlannedTensor]) -> PlannedFile:
    return PlannedFile(
        name=name,
        header=gguf.header(keys, tensors),
        tensors=tuple(tensors),
        alignment=gguf.ALIGNMENT,
    )


def _keys(config: GrokConfig, dtype: WeightDtype, tokenizer: Path | None) -> dict[str, bytes]:
    counts = {
        "context_length": config.sequence_len,
        "embedding_length": config.emb_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn_size,
        "expert_feed_forward_length": config.ffn_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_selected_experts,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_q_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.key_size,
        "attention.value_length": config.key_size,
        "rope.dimension_count": config.key_size,
    }
    factors = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.output_scale": config.attn_output_multiplier,
        "attn_logit_softcapping": config.attn_logit_cap,
        "router_logit_softcapping": NO_CAP,
        "rope.freq_base": config.rope_base,
        "embedding_scale": config.embedding_multiplier_scale,
        "logit_scale": config.output_multiplier_scale,
    }
    return {
        "general.architecture": gguf.string("grok"),
        "general.file_type": gguf.uint32(_FILE_TYPES[dtype]),
        "general.quantization_version": gguf.uint32(QUANTISATION_VERSION),
        **{f"grok.{key}": gguf.uint32(count) for key, count in counts.items()},
        **{f"grok.{key}": gguf.float32(factor) for key, factor in factors.items()},
        **(
            tokenizer_keys(tokenizer, config)
            if tokenizer
            else {"tokenizer.ggml.model": gguf.string("no_vocab")}
        ),
    }


def _layer(index: WeightIndex, layer: int, dtype: WeightDtype) -> Iterator[PlannedTensor]:
    block, ours = f"blk.{layer}", f"layers.{layer}"
    for name, source in _NORMS.items():
        yield _floats(f"{block}.{name}", index, f"{ours}.{source}.scale")
    yield _floats(f"{block}.ffn_gate_inp", index, f"{ours}.router.weight")
    for name, source in _MATRICES.items():
        yield _matrix(f"{block}.{name}", index, f"{ours}.{source}", dtype)


def _floats(name: str, index: WeightIndex, source: str) -> PlannedTensor:
    # The router, too, is [out, in] there; a vector stays.
    shape = index[source].shape[::-1]
    return _tensor(name, "F32", shape, lambda: rows_of_floats(index, source))


def _embedding(index: WeightIndex, head: HeadDtype) -> PlannedTensor:
    source = "embedding.weight"

    def int8() -> Iterator[NDArray[Any]]:
        first = 0
        for entries in rows_of_floats(index, source):
            codes, scales = quantised(entries, first=first)
            yield _q8_0(Rows(codes=codes.T, scales=scales[:, None]), source)
            first += len(entries)

    blocks = int8 if head == "int8" else lambda: rows_of_floats(index, source)
    dtype = "Q8_0" if head == "int8" else "F32"
    return _tensor("token_embd", dtype, index[source].shape, blocks)


def _matrix(name: str, index: WeightIndex, source: str, dtype: WeightDtype) -> PlannedTensor:
    *experts, inner, outer = index[f"{source}.weight"].shape

    def blocks() -> Iterator[NDArray[Any]]:
        for expert in np.ndindex(*experts):
            for rows in rows_of_matrix(index, source, *expert):
                if dtype == "int8":
                    yield _q8_0(rows, source)
                else:
                    yield rounded(rows.values(), dtype, source)

    return _tensor(name, _DTYPES[dtype], (*experts, outer, inner), blocks)


def _q8_0(rows: Rows, name: str) -> NDArray[np.uint8]:
    scales = rounded(rows.scales_of_blocks(gguf.BLOCK), "float16", name)
    return gguf.q8_0(rows.codes, scales)


def _tensor(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    blocks: Callable[[], Iterator[NDArray[Any]]],
) -> PlannedTensor:
    return PlannedTensor(
        name=f"{name}.weight",
        dtype=dtype,
        shape=shape,
        nbytes=gguf.tensor_nbytes(shape, dtype),
        blocks=blocks,
    )
