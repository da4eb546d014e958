"""Put a checkpoint through `measure` with a plain eager loop: python run_torch.py CHECKPOINT ...

Weights are dequantised to bfloat16 once, as [out, in]; activations and cache are bfloat16, norms,
router, softmax and the cap float32.
"""

from pathlib import Path

import numpy as np
import torch
from matrices import Matrices
from measure import CONTEXT, measure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from export_grok.export.checkpoint import open_weights

NORMS = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")


class Layer:
    """One decoder layer with its cache."""

    def __init__(self, weights: Matrices, number: int) -> None:
        self.config = config = weights.config
        name = f"layers.{number}"

        def matrix(part: str, *index: int) -> Tensor:
            values = weights.matrix(f"{name}.{part}", *index).values()
            return torch.from_numpy(values).bfloat16()

        self.norm = {
            norm: torch.from_numpy(weights.floats(f"{name}.{norm}.scale").copy()) for norm in NORMS
        }
        self.query_key_value = torch.cat(
            [matrix(f"attention.{part}") for part in ("query", "key", "value")]
        )
        self.out = matrix("attention.out")
        self.router = torch.from_numpy(weights.floats(f"{name}.router.weight").T.copy())
        self.experts = [
            tuple(matrix(f"experts.{part}", expert) for part in ("gate", "up", "down"))
            for expert in range(config.num_experts)
        ]
        shape = (config.num_kv_heads, CONTEXT, config.key_size)
        self.keys, self.values = torch.zeros(2, *shape, dtype=torch.bfloat16)

    def forward(self, h: Tensor, start: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Return h [S, M] after the layer."""
        y = self._attention(self._normed(h, "pre_attn_norm"), start, cos, sin)
        h = h + self._normed(y, "post_attn_norm")
        y = self._mixture(self._normed(h, "pre_moe_norm"))
        return h + self._normed(y, "post_moe_norm")

    def _normed(self, x: Tensor, which: str) -> Tensor:
        return rms_norm(x, self.norm[which], self.config.rms_norm_eps)

    def _attention(self, x: Tensor, start: int, cos: Tensor, sin: Tensor) -> Tensor:
        config, end = self.config, start + len(x)
        sizes = (config.q_size, config.kv_size, config.kv_size)
        query, key, value = (
            part.view(len(x), -1, config.key_size).transpose(0, 1)
            for part in functional.linear(x, self.query_key_value).split(sizes, dim=-1)
        )
        self.keys[:, start:end] = rotated(key, cos, sin)
        self.values[:, start:end] = value
        grouped = rotated(query, cos, sin).reshape(config.num_kv_heads, -1, config.key_size)
        logits = (grouped @ self.keys[:, :end].transpose(1, 2)).float()
        cap = config.attn_logit_cap
        logits = cap * torch.tanh(logits * (config.attn_output_multiplier / cap))
        # Each key/value head has the S queries of its first head, then those of its next.
        logits = logits.view(config.num_kv_heads, -1, len(x), end)
        if len(x) > 1:
            seen = torch.arange(end) <= torch.arange(start, end)[:, None]
            logits = logits.masked_fill(~seen, -torch.inf)
        p = torch.softmax(logits, dim=-1).bfloat16().view(config.num_kv_heads, -1, end)
        y = (p @ self.values[:, :end]).view(config.num_q_heads, len(x), config.key_size)
        return functional.linear(y.transpose(0, 1).reshape(len(x), -1), self.out)

    def _mixture(self, x: Tensor) -> Tensor:
        gates = torch.softmax(functional.linear(x.float(), self.router), dim=-1)
        gates, chosen = torch.topk(gates, self.config.num_selected_experts)
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = torch.where(chosen == expert)
            gate, up, down = self.experts[expert]
            rows_x = x[rows]
            hidden = functional.gelu(functional.linear(rows_x, gate), approximate="tanh")
            y = functional.linear(hidden * functional.linear(rows_x, up), down)
            total.index_add_(0, rows, y * gates[rows, places, None].bfloat16())
        return total


class Torch:
    """The whole model; see `measure.Peer`."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        config, index = open_weights(checkpoint)
        weights = Matrices(config, index)
        self._config = config
        self._embedding = torch.from_numpy(weights.floats("embedding.weight").copy()).bfloat16()
        self._final_norm = torch.from_numpy(weights.floats("final_norm.scale").copy())
        self._layers = [Layer(weights, number) for number in range(config.num_layers)]
        exponents = torch.arange(0, config.key_size, 2, dtype=torch.float32) / config.key_size
        phase = torch.arange(CONTEXT)[:, None] * config.rope_base**-exponents
        self._cos, self._sin = phase.cos(), phase.sin()
        self.vocabulary = config.vocab_size
        self.about = {"torch": torch.__version__}

    @torch.inference_mode()
    def forward(self, tokens: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the last one's logits."""
        config, end = self._config, start + len(tokens)
        cos, sin = self._cos[start:end], self._sin[start:end]
        h = self._embedding[torch.from_numpy(tokens)] * config.embedding_multiplier_scale
        for layer in self._layers:
            h = layer.forward(h, start, cos, sin)
        f = rms_norm(h[-1:], self._final_norm, config.rms_norm_eps)
        logits = functional.linear(f, self._embedding).float() * config.output_multiplier_scale
        return logits[0].numpy()


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return x normed in float32, in the dtype of x."""
    return functional.rms_norm(x.float(), scale.shape, scale, eps).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [H, S, D], each token turned by its place."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


if __name__ == "__main__":
    measure(Torch)
