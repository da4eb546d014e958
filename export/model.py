"""Grok-1 in PyTorch, as the original computes it.

Shape letters, the one legend of this project:

    B  rows of a batch      S  new tokens of a row    T  slots of the cache
    Hq query heads          Hkv key/value heads       G  query heads per key/value head, Hq / Hkv
    D  size of a head       M  width of the model     F  width of an expert
    E  experts              C  chosen experts         V  vocabulary
    K  rows of a matrix     N  columns of a matrix    R  groups of rows with scales of their own

`dtype` is that of activations and cache. float32 keeps everything exact; bfloat16 rounds wherever
the original does (measured on the jaxpr of xai-org/grok-1 model.py), multipliers included.

Ranks share a layer evenly: heads, columns of an expert and rows of the vocabulary. A module made
for one of several ranks holds its share, as `export.partition` cuts it, and where a sum runs over
what is shared it goes through `all_reduce`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from export_grok.config import Dtype, GrokConfig, RankConfig
from export_grok.export.kv_cache import KVCache
from export_grok.plugins.all_reduce.reference import all_reduce
from export_grok.plugins.int8_linear.reference import int8_linear
from export_grok.plugins.moe_experts.reference import moe_experts
from export_grok.plugins.softcap_attention.reference import softcap_attention, softcap_attention_
from export_grok.weights import NUMPY_DTYPES

__all__ = ["DecoderLayer", "Embedding", "Grok1", "Head", "Router", "Routing"]


def rounded(multiplier: float, dtype: Dtype) -> float:
    """Return the multiplier as a number of `dtype`: the original rounds it before it is used."""
    return float(np.asarray(multiplier).astype(NUMPY_DTYPES[dtype]))


def summed(x: Tensor, rank: RankConfig) -> Tensor:
    """Return the sum of x over all ranks; x itself if there is one."""
    if rank.tensor_parallel == 1:
        return x
    total: Tensor = all_reduce(x, rank.tensor_parallel)
    return total


class Int8Linear(nn.Module):
    """x [..., K] -> [..., N] by an int8 matrix with scales."""

    def __init__(
        self, rows: int, columns: int, groups: int, scales: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.weight: Tensor
        self.scales: Tensor
        self.register_buffer("weight", torch.empty(rows, columns, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(groups, columns, dtype=scales))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = int8_linear(x, self.weight, self.scales)
        return y


class RMSNorm(nn.Module):
    """scale * x / sqrt(mean(x^2) + eps) in float32, rounded once at the end."""

    def __init__(self, config: GrokConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.scale: Tensor
        self.register_buffer("scale", torch.empty(config.emb_size))

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), self.scale.shape, self.scale, self.eps)
        return normed.to(x.dtype)


def rotary_embedding(x: Tensor, position: Tensor, head_size: int, base: float) -> Tensor:
    """Return x [B, S, H*D] rotated by its position [B, S]; halves (j, j + D/2) turn together.

    phase_j = position * base^(-2j / D), in float32 whatever the dtype of x.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    phase = position.unsqueeze(-1).float() * base**-exponents
    rotated: Tensor = torch.onnx.ops.rotary_embedding(
        x.float(), phase.cos(), phase.sin(), num_heads=x.shape[-1] // head_size
    )
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and soft-capped logits."""

    def __init__(self, rank: RankConfig) -> None:
        super().__init__()
        self.rank = rank
        model = rank.model.emb_size
        self.query = Int8Linear(model, rank.q_size, 1)
        self.key = Int8Linear(model, rank.kv_size, 1)
        self.value = Int8Linear(model, rank.kv_size, 1)
        self.out = Int8Linear(rank.q_size, model, rank.row_parallel_scale_groups)

    def forward(
        self, x: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rank, config = self.rank, self.rank.model
        position = start.unsqueeze(-1) + torch.arange(x.shape[1])
        query = rotary_embedding(self.query(x), position, config.key_size, config.rope_base)
        key = rotary_embedding(self.key(x), position, config.key_size, config.rope_base)
        settings = (
            rank.num_q_heads,
            rank.num_kv_heads,
            config.attn_output_multiplier,
            config.attn_logit_cap,
        )
        inputs = (query, key, self.value(x), k_cache, v_cache, start, *settings)
        if torch.compiler.is_exporting():
            y, k_cache, v_cache = softcap_attention(*inputs)
        else:
            y = softcap_attention_(*inputs)
        return summed(self.out(y), rank), k_cache, v_cache


class Routing(NamedTuple):
    """What the router decides for every token.

    Attributes:
        logits: float32 [B, S, E].
        probabilities: softmax over all experts, float32 [B, S, E].
        gates: probabilities of the chosen experts, not renormalised, float32 [B, S, C].
        experts: the chosen, most probable first, the lower number at a tie, int64 [B, S, C].
    """

    logits: Tensor
    probabilities: Tensor
    gates: Tensor
    experts: Tensor


class Router(nn.Module):
    """x [B, S, M] -> Routing, in float32 whatever the dtype of x."""

    def __init__(self, config: GrokConfig) -> None:
        super().__init__()
        self.chosen = config.num_selected_experts
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(config.emb_size, config.num_experts))

    def forward(self, x: Tensor) -> Routing:
        logits = x.float() @ self.weight
        probabilities = torch.softmax(logits, dim=-1)
        if torch.compiler.is_exporting():  # ONNX TopK takes the lower number at a tie
            gates, experts = torch.topk(probabilities, self.chosen)
        else:  # torch.topk takes any
            gates, experts = torch.sort(probabilities, descending=True, stable=True)
        return Routing(
            logits, probabilities, gates[..., : self.chosen], experts[..., : self.chosen]
        )


class ExpertMatrix(nn.Module):
    """The int8 matrices [E, K, N] of all experts, with scales [E, R, N]."""

    def __init__(self, experts: int, rows: int, columns: int, groups: int) -> None:
        super().__init__()
        self.weight: Tensor
        self.scales: Tensor
        self.register_buffer("weight", torch.empty(experts, rows, columns, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(experts, groups, columns, dtype=torch.bfloat16))


class Experts(nn.Module):
    """The gated sum of each token's chosen experts, [B, S, M]."""

    def __init__(self, rank: RankConfig) -> None:
        super().__init__()
        self.rank = rank
        experts, model, width = rank.model.num_experts, rank.model.emb_size, rank.ffn_size
        self.gate = ExpertMatrix(experts, model, width, 1)
        self.up = ExpertMatrix(experts, model, width, 1)
        self.down = ExpertMatrix(experts, width, model, rank.row_parallel_scale_groups)

    def forward(self, x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        gate, up, down = self.gate, self.up, self.down
        y: Tensor = moe_experts(
            x,
            gates.to(x.dtype),
            experts,
            gate.weight,
            gate.scales,
            up.weight,
            up.scales,
            down.weight,
            down.scales,
        )
        return summed(y, self.rank)


class DecoderLayer(nn.Module):
    """One of the equal layers: attention, then experts, each between two norms."""

    def __init__(self, config: GrokConfig, tensor_parallel: int = 1) -> None:
        super().__init__()
        rank = config.for_rank(tensor_parallel)
        self.pre_attn_norm = RMSNorm(config)
        self.attention = Attention(rank)
        self.post_attn_norm = RMSNorm(config)
        self.pre_moe_norm = RMSNorm(config)
        self.router = Router(config)
        self.experts = Experts(rank)
        self.post_moe_norm = RMSNorm(config)

    def forward(
        self, h: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return h after the layer, and its caches.

        Args:
            h: residual stream [B, S, M].
            start: tokens of each row that the cache holds already [B], int64.
            k_cache: keys [B, Hkv, T, D]. Written in place, except under torch.export.
            v_cache: values, likewise.
        """
        y, k_cache, v_cache = self.attention(self.pre_attn_norm(h), start, k_cache, v_cache)
        h = h + self.post_attn_norm(y)
        x = self.pre_moe_norm(h)
        routing = self.router(x)
        h = h + self.post_moe_norm(self.experts(x, routing.gates, routing.experts))
        return h, k_cache, v_cache


class Embedding(nn.Module):
    """tokens [B, S] -> h [B, S, M], times the embedding multiplier."""

    def __init__(self, config: GrokConfig, dtype: Dtype, tensor_parallel: int = 1) -> None:
        super().__init__()
        self.rank = config.for_rank(tensor_parallel)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.multiplier = rounded(config.embedding_multiplier_scale, dtype)
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(self.rank.vocab_size, config.emb_size))

    def forward(self, tokens: Tensor, first: Tensor | None = None) -> Tensor:
        """Return h; `first` [1] is the token id of this rank's first row, if there are ranks."""
        if first is None:
            return functional.embedding(tokens, self.weight).to(self.dtype) * self.multiplier
        place = tokens - first
        mine = (place >= 0) & (place < self.weight.shape[0])
        rows = functional.embedding(torch.where(mine, place, 0), self.weight)
        h = rows.to(self.dtype) * self.multiplier
        return summed(torch.where(mine.unsqueeze(-1), h, 0.0), self.rank)  # one rank's, and zeros


class Head(nn.Module):
    """h [B, S, M] -> float32 logits [B, S, V] by the embedding's transpose, times a multiplier.

    The values are those of the model's dtype. Without an embedding the head has a matrix of its
    own, `unembedding`: int8 [M, V], with a float32 scale for each entry of the vocabulary. One of
    several ranks gives the logits of its share of the vocabulary.
    """

    def __init__(
        self,
        config: GrokConfig,
        dtype: Dtype,
        embedding: Embedding | None,
        tensor_parallel: int = 1,
    ) -> None:
        super().__init__()
        self.multiplier = rounded(config.output_multiplier_scale, dtype)
        self.final_norm = RMSNorm(config)
        self.embedding = embedding
        if embedding is None:
            entries = config.for_rank(tensor_parallel).vocab_size
            self.unembedding = Int8Linear(config.emb_size, entries, 1, torch.float32)

    def forward(self, h: Tensor, last: Tensor | None = None) -> Tensor:
        """Return the logits of every token, or those of token last[b] of each row: [B, V]."""
        if last is not None:
            h = h[torch.arange(h.shape[0]), last]
        f = self.final_norm(h)
        return (self._product(f) * self.multiplier).float()

    def _product(self, f: Tensor) -> Tensor:
        if self.embedding is None:
            y: Tensor = self.unembedding(f)
            return y
        dtype = f.dtype
        flat = f.reshape(-1, f.shape[-1]).float()
        logits = functional.linear(flat, self.embedding.weight.to(dtype).float()).to(dtype)
        return logits.reshape(*f.shape[:-1], -1)


class Grok1(nn.Module):
    """The whole model. Its buffers are named as `export.parameters` says."""

    def __init__(self, config: GrokConfig, dtype: Dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype: Dtype = dtype
        self.embedding = Embedding(config, dtype)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.head = Head(config, dtype, self.embedding)

    def forward(self, tokens: Tensor, start: Tensor, cache: KVCache) -> Tensor:
        """Return the float32 logits of every new token, [B, S, V]; `cache` is written in place.

        Rows may differ in length: pad a shorter one on the right and ignore what comes out there.
        The next call with the true start overwrites what the padding left in the cache.

        Args:
            tokens: new tokens [B, S], int64.
            start: tokens of each row that the cache holds already [B], int64.
            cache: of the model's dtype.

        Raises:
            RequestError: the new tokens do not fit the cache.
        """
        cache.check_room(start, tokens.shape[1])
        h = self.embedding(tokens)
        for layer, k_cache, v_cache in zip(self.layers, cache.keys, cache.values, strict=True):
            h, _, _ = layer(h, start, k_cache, v_cache)
        logits: Tensor = self.head(h)
        return logits
