"""The logits of a prompt in float64, with numpy, from the stored weights."""

from collections.abc import Sequence

import numpy as np
from matrices import Matrices
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.export.weights_to.values import Rows

__all__ = ["reference_logits", "relative_error"]

Array = NDArray[np.float64]


def reference_logits(weights: Matrices, tokens: Sequence[int]) -> Array:
    """Return the logits of every token, [S, V]; one matrix is in memory at a time."""
    config = weights.config
    embedding = weights.floats("embedding.weight")
    h = embedding[np.asarray(tokens)].astype(np.float64) * config.embedding_multiplier_scale
    for layer in range(config.num_layers):
        name = f"layers.{layer}"

        def norm(x: Array, which: str, name: str = name) -> Array:
            return _norm(x, weights.floats(f"{name}.{which}.scale"), config)

        h = h + norm(_attention(norm(h, "pre_attn_norm"), weights, name), "post_attn_norm")
        h = h + norm(_experts(norm(h, "pre_moe_norm"), weights, name), "post_moe_norm")
    f = _norm(h, weights.floats("final_norm.scale"), config)
    return f @ embedding.T.astype(np.float64) * config.output_multiplier_scale


def relative_error(logits: NDArray[np.float32], reference: Array) -> float:
    """Return the RMS of the difference by the RMS of the reference."""
    return float(np.sqrt(np.mean((logits - reference) ** 2) / np.mean(reference**2)))


def _norm(x: Array, scale: NDArray[np.float32], config: GrokConfig) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps) * scale


def _product(x: Array, matrix: Rows) -> Array:
    parts = np.split(matrix.codes, matrix.scales.shape[1], axis=1)
    pieces = zip(np.split(x, len(parts), axis=1), parts, matrix.scales.T, strict=True)
    return sum((piece @ part.T.astype(np.float64)) * scale for piece, part, scale in pieces)


def _rotated(x: Array, base: float) -> Array:
    """Return x [S, H, D], each token turned by its place."""
    size = x.shape[-1]
    phase = np.arange(len(x))[:, None] * base ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(phase)[:, None], np.sin(phase)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(x: Array, weights: Matrices, name: str) -> Array:
    config = weights.config
    query, key, value = (
        _product(x, weights.matrix(f"{name}.attention.{part}")).reshape(
            len(x), -1, config.key_size
        )
        for part in ("query", "key", "value")
    )
    group = config.num_q_heads // config.num_kv_heads
    query = _rotated(query, config.rope_base)
    key, value = (np.repeat(a, group, axis=1) for a in (_rotated(key, config.rope_base), value))
    logits = np.einsum("shd,thd->hst", query, key) * config.attn_output_multiplier
    logits = config.attn_logit_cap * np.tanh(logits / config.attn_logit_cap)
    logits = np.where(np.tri(len(x), dtype=bool), logits, -np.inf)
    y = np.einsum("hst,thd->shd", _softmax(logits), value).reshape(len(x), -1)
    return _product(y, weights.matrix(f"{name}.attention.out"))


def _experts(x: Array, weights: Matrices, name: str) -> Array:
    config = weights.config
    gates = _softmax(x @ weights.floats(f"{name}.router.weight"))
    chosen = np.argsort(-gates, axis=-1, kind="stable")[:, : config.num_selected_experts]
    y = np.zeros_like(x)
    for expert in np.unique(chosen):
        rows = np.flatnonzero((chosen == expert).any(axis=-1))
        gate, up = (
            _product(x[rows], weights.matrix(f"{name}.experts.{part}", expert))
            for part in ("gate", "up")
        )
        down = _product(_gelu(gate) * up, weights.matrix(f"{name}.experts.down", expert))
        y[rows] += gates[rows, expert, None] * down
    return y


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)
