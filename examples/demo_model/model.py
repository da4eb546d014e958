"""Grok-1 with float matrices that learn: the function of `export.model`, differentiable.

Norms, router, embedding and head are the project's own modules. Matrices, rotary embedding,
attention and experts are written again here, because the project's take int8 or have no gradient.
Parameters have the names of `export.parameters`. Shape letters are those of `export.model`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from export_grok.config import GrokConfig
from export_grok.export.model import Embedding, Head, RMSNorm, Router, Routing
from export_grok.plugins.moe_experts.reference import activation

__all__ = ["TrainedGrok1", "balance_loss", "capped_attention"]

QUERY_BLOCK = 32
CHUNK_ITEMS = 1 << 20  # 4 MB of logits at a time: they stay in the second cache


def parameters_of(module: nn.Module) -> nn.Module:
    """Return the module, its own buffers made parameters."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        delattr(module, name)
        setattr(module, name, nn.Parameter(buffer))
    return module


class CappedAttention(torch.autograd.Function):
    """Causal soft-capped attention that keeps no logits for the way back.

    With z = 2 x / cap and r = 1 / (exp(z) + 1), cap * tanh(x / cap) = cap - 2 cap r. The softmax
    drops the constant, and what is left lies in (-2 cap, 0): no maximum has to be found.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float
    ) -> Tensor:
        """Return the output [N, G, S, D] of query [N, G, S, D] over key, value [N, S, D]."""
        out, sums = torch.empty_like(query), torch.empty(query.shape[:-1])
        ctx.factor, ctx.cap = 2 * scale / cap, cap
        for rows, block, end in _blocks(query):
            dots = torch.bmm(_flat(query[rows, :, block]) * ctx.factor, key[rows, :end].mT)
            weights = _weights(dots.exp_().add_(1).reciprocal_(), cap, block)
            total = weights.sum(-1, keepdim=True)
            mean = torch.bmm(weights, value[rows, :end]).div_(total)
            out[rows, :, block] = mean.view_as(out[rows, :, block])
            sums[rows, :, block] = total.view_as(sums[rows, :, block])
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        factor, cap = ctx.factor, ctx.cap
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        slope = (grad * out).sum(-1, keepdim=True)
        for rows, block, end in _blocks(query):
            q = _flat(query[rows, :, block]) * factor
            g = _flat(grad[rows, :, block])
            r = torch.bmm(q, key[rows, :end].mT).exp_().add_(1).reciprocal_()
            p = _weights(r, cap, block).div_(sums[rows, :, block].reshape(*q.shape[:2], 1))
            grad_value[rows, :end] += torch.bmm(p.mT, g)
            d = torch.bmm(g, value[rows, :end].mT).sub_(_flat(slope[rows, :, block])).mul_(p)
            d.mul_(torch.addcmul(r, r, r, value=-1)).mul_(2 * cap)
            grad_key[rows, :end] += torch.bmm(d.mT, q)
            q = torch.bmm(d, key[rows, :end]).mul_(factor)
            grad_query[rows, :, block] = q.view_as(grad_query[rows, :, block])
        return grad_query, grad_key, grad_value, None, None


def _blocks(query: Tensor) -> list[tuple[slice, slice, int]]:
    """Return pieces of the work: heads, queries, and how many keys these can see."""
    heads, group, tokens, _ = query.shape
    chunk = max(1, CHUNK_ITEMS // (group * min(QUERY_BLOCK, tokens) * tokens))
    return [
        (slice(head, head + chunk), slice(first, end), end)
        for head in range(0, heads, chunk)
        for first in range(0, tokens, QUERY_BLOCK)
        for end in [min(first + QUERY_BLOCK, tokens)]
    ]


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def _weights(r: Tensor, cap: float, block: slice) -> Tensor:
    """Return exp(-2 cap r), 0 where the key lies behind the query."""
    weights = torch.mul(r, -2 * cap).exp_()
    own = block.stop - block.start
    seen = torch.ones(own, own).tril().repeat(r.shape[1] // own, 1)
    weights[..., block.start :] *= seen
    return weights


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float
) -> Tensor:
    """Return `attend` of query [B, S, Hkv, G, D] over key, value [B, S, Hkv, D]: as query."""
    batch, tokens, kv_heads, group, size = query.shape
    rows = query.permute(0, 2, 3, 1, 4).reshape(-1, group, tokens, size)
    keys, values = (x.transpose(1, 2).reshape(-1, tokens, size) for x in (key, value))
    y: Tensor = CappedAttention.apply(rows, keys, values, scale, cap)  # type: ignore[no-untyped-call]
    return y.view(batch, kv_heads, group, tokens, size).permute(0, 3, 1, 2, 4)


class Matrix(nn.Module):
    """A weight [..., K, N] of columns, or of every expert, as it is before it is made int8."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, over whole sequences, without a cache."""

    def __init__(self, config: GrokConfig) -> None:
        super().__init__()
        self.config = config
        self.query = Matrix(config.emb_size, config.q_size)
        self.key = Matrix(config.emb_size, config.kv_size)
        self.value = Matrix(config.emb_size, config.kv_size)
        self.out = Matrix(config.q_size, config.emb_size)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        by_head = (*x.shape[:2], config.num_kv_heads, -1, config.key_size)
        query = self._rotated(self.query(x)).view(by_head)
        value = self.value(x).view(by_head).squeeze(3)
        settings = (config.attn_output_multiplier, config.attn_logit_cap)
        y = capped_attention(query, self._rotated(self.key(x)), value, *settings)
        attended: Tensor = self.out(y.flatten(2))
        return attended

    def _rotated(self, x: Tensor) -> Tensor:
        """Return x [B, S, H*D] as [B, S, H, D], turned by its position."""
        size, base = self.config.key_size, self.config.rope_base
        frequency = base ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        phase = torch.arange(x.shape[1])[:, None, None] * frequency
        first, second = x.view(*x.shape[:2], -1, size).chunk(2, dim=-1)
        cos, sin = phase.cos(), phase.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Experts(nn.Module):
    """The gated sum of each token's chosen experts, [B, S, M]."""

    def __init__(self, config: GrokConfig) -> None:
        super().__init__()
        experts, model, width = config.num_experts, config.emb_size, config.ffn_size
        self.gate = Matrix(experts, model, width)
        self.up = Matrix(experts, model, width)
        self.down = Matrix(experts, width, model)

    def forward(self, x: Tensor, gates: Tensor, experts: Tensor) -> Tensor:
        tokens, chosen = x.flatten(0, 1), experts.flatten(0, 1)
        gate_of = gates.flatten(0, 1)
        total = torch.zeros_like(tokens)
        # unbind: one gradient for all experts, where indexing would fill one with zeros for each.
        matrices = zip(*(m.weight.unbind() for m in (self.gate, self.up, self.down)), strict=True)
        for expert, (gate, up, down) in enumerate(matrices):
            row, place = torch.where(chosen == expert)
            inputs = tokens.index_select(0, row)
            y = activation(inputs @ gate, inputs @ up) @ down
            total = total.index_add(0, row, gate_of[row, place].unsqueeze(-1) * y)
        return total.view_as(x)


class DecoderLayer(nn.Module):
    """Attention, then experts, each between two norms."""

    def __init__(self, config: GrokConfig) -> None:
        super().__init__()
        self.pre_attn_norm = parameters_of(RMSNorm(config))
        self.attention = Attention(config)
        self.post_attn_norm = parameters_of(RMSNorm(config))
        self.pre_moe_norm = parameters_of(RMSNorm(config))
        self.router = parameters_of(Router(config))
        self.experts = Experts(config)
        self.post_moe_norm = parameters_of(RMSNorm(config))

    def forward(self, h: Tensor) -> tuple[Tensor, Routing]:
        h = h + self.post_attn_norm(self.attention(self.pre_attn_norm(h)))
        x = self.pre_moe_norm(h)
        routing: Routing = self.router(x)
        y = self.experts(x, routing.gates, routing.experts)
        return h + self.post_moe_norm(y), routing


class TrainedGrok1(nn.Module):
    """The whole model in float32."""

    def __init__(self, config: GrokConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config, "float32")
        parameters_of(self.embedding)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        head = Head(config, "float32", self.embedding)
        parameters_of(head.final_norm)
        # Two paths to one module would give its parameters two names.
        self.final_norm = head.final_norm
        self._head = [head]

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return the logits [B, S, V] of tokens [B, S], and each layer's routing."""
        h, routings = self.embedding(tokens), []
        for layer in self.layers:
            h, routing = layer(h)
            routings.append(routing)
        return self._head[0](h), routings

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the weights: what a module adds is small beside the unit length it starts from."""
        for name, parameter in self.named_parameters():
            if name.endswith("scale"):
                added = name.split(".")[-2].startswith("post")
                parameter.fill_((2 * self.config.num_layers) ** -0.5 if added else 1.0)
            else:
                rows = parameter.shape[-1 if name.startswith("embedding") else -2]
                parameter.normal_(0, 1 / math.sqrt(rows))


def balance_loss(routings: list[Routing]) -> Tensor:
    """Return the mean over layers of E * sum_e(share of choices_e * mean probability_e).

    It is 1 where all experts get as many tokens (Switch Transformers, equation 4), else more.
    """
    losses = []
    for routing in routings:
        experts = routing.probabilities.shape[-1]
        share = (
            torch.bincount(routing.experts.flatten(), minlength=experts) / routing.experts.numel()
        )
        losses.append(experts * (share * routing.probabilities.mean(dim=(0, 1))).sum())
    return torch.stack(losses).mean()
