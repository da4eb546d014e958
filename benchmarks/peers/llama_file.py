"""The weights of a checkpoint as a GGUF file of architecture `grok`, in Q8_0.

Q8_0 is blocks of 32 codes along the products, each behind its scale in float16. The codes stay as
they are; a bfloat16 scale of usual size is exact in float16. The tokenizer is left out.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matrices import Matrices, Matrix
from numpy.typing import NDArray

from export_grok.files import atomic_file

__all__ = ["write_llama_file"]

# Numbers of the GGUF format, version 3.
MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
UINT32, FLOAT32, STRING = 4, 6, 8
F32, Q8_0 = 0, 8
MOSTLY_Q8_0 = 7
QUANTISATION_VERSION = 2
BLOCK = 32

_NORMS = {
    "attn_norm": "pre_attn_norm",
    "attn_output_norm": "post_attn_norm",
    "ffn_norm": "pre_moe_norm",
    "layer_output_norm": "post_moe_norm",
}
_LINEARS = {"attn_q": "query", "attn_k": "key", "attn_v": "value", "attn_output": "out"}


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor of the file: its shape in our order, and what makes its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    blocks: Callable[[], Iterator[bytes]]

    @property
    def nbytes(self) -> int:
        items = int(np.prod(self.shape))
        return items * 4 if self.kind == F32 else items // BLOCK * (BLOCK + 2)


def write_llama_file(weights: Matrices, out: Path) -> None:
    """Write the file; a matrix at a time is in memory.

    Raises:
        OutputError: it cannot be written.
        ValueError: a group of rows is no multiple of 32, or the embedding no int8 matrix.
    """
    entries, tensors = _entries(weights), list(_tensors(weights))
    header = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(entries))]
    header += [_string(key) + _value(value) for key, value in entries.items()]
    offset = 0
    for tensor in tensors:
        shape = tensor.shape[::-1]
        header.append(_string(tensor.name) + struct.pack("<I", len(shape)))
        header.append(struct.pack(f"<{len(shape)}QIQ", *shape, tensor.kind, offset))
        offset += _padded(tensor.nbytes)
    head = b"".join(header)
    with atomic_file(out) as file:
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for tensor in tensors:
            written = sum(file.write(block) for block in tensor.blocks())
            if written != tensor.nbytes:
                raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.nbytes}")
            file.write(b"\0" * (_padded(written) - written))


def _entries(weights: Matrices) -> dict[str, int | float | str]:
    config = weights.config
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
        "rope.freq_base": config.rope_base,
        "embedding_scale": config.embedding_multiplier_scale,
        "logit_scale": config.output_multiplier_scale,
    }
    return {
        "general.architecture": "grok",
        "general.file_type": MOSTLY_Q8_0,
        "general.quantization_version": QUANTISATION_VERSION,
        "tokenizer.ggml.model": "no_vocab",
        **{f"grok.{key}": count for key, count in counts.items()},
        **{f"grok.{key}": float(factor) for key, factor in factors.items()},
    }


def _tensors(weights: Matrices) -> Iterator[_Tensor]:
    def floats(name: str, source: str) -> _Tensor:
        values = weights.floats(source)
        return _Tensor(
            name=f"{name}.weight",
            shape=values.shape[::-1],  # the router is a matrix: [out, in] there
            kind=F32,
            blocks=lambda: iter([values.T.tobytes()]),
        )

    def matrices(name: str, source: str) -> _Tensor:
        *lead, rows, columns = weights.shape(f"{source}.weight")
        return _Tensor(
            name=f"{name}.weight",
            shape=(*lead, columns, rows),
            kind=Q8_0,
            blocks=lambda: (
                _blocks_of_32(weights.matrix(source, *index)).tobytes()
                for index in np.ndindex(*lead)
            ),
        )

    yield _Tensor(
        name="token_embd.weight",
        shape=weights.shape("embedding.weight"),
        kind=Q8_0,
        blocks=lambda: iter([_blocks_of_32(weights.head()).tobytes()]),
    )
    yield floats("output_norm", "final_norm.scale")
    for layer in range(weights.config.num_layers):
        block, ours = f"blk.{layer}", f"layers.{layer}"
        for name, source in _NORMS.items():
            yield floats(f"{block}.{name}", f"{ours}.{source}.scale")
        for name, source in _LINEARS.items():
            yield matrices(f"{block}.{name}", f"{ours}.attention.{source}")
        yield floats(f"{block}.ffn_gate_inp", f"{ours}.router.weight")
        for part in ("gate", "up", "down"):
            yield matrices(f"{block}.ffn_{part}_exps", f"{ours}.experts.{part}")


def _blocks_of_32(matrix: Matrix) -> NDArray[np.uint8]:
    rows, columns = matrix.codes.shape
    blocks = np.empty((rows, columns // BLOCK, BLOCK + 2), np.uint8)
    scales = matrix.block_scales(BLOCK).astype("<f2")
    blocks[..., :2] = scales[..., None].view(np.uint8)
    blocks[..., 2:] = matrix.codes.view(np.uint8).reshape(rows, -1, BLOCK)
    return blocks


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: int | float | str) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    return struct.pack("<If", FLOAT32, value)
