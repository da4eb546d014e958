"""The formula of moe_experts in PyTorch, registered as torch op `grok1::moe_experts`.

For a token x and its C chosen experts e with gates p_e:

    y = round_T(sum_e p_e * ((gelu_tanh(round_T(x @ Wgate_e)) * round_T(x @ Wup_e)) @ Wdown_e))

T is the dtype of x. Matrices are rounded to T, everything behind the two inner roundings is
float32, the down projection too (NUMERICS step 12). Gates are used as they come: the original does
not renormalise them over the chosen experts.
"""

import torch
from torch import Tensor
from torch.nn import functional

from export_grok.plugins.int8_linear.reference import dequantise

__all__ = ["activation", "moe_experts"]


def activation(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the tanh form of gelu."""
    return functional.gelu(gate, approximate="tanh") * up


@torch.library.custom_op("grok1::moe_experts", mutates_args=())
def moe_experts(
    x: Tensor,
    gates: Tensor,
    experts: Tensor,
    gate_weight: Tensor,
    gate_scales: Tensor,
    up_weight: Tensor,
    up_scales: Tensor,
    down_weight: Tensor,
    down_scales: Tensor,
) -> Tensor:
    """Return the gated sum of each token's experts, [B, S, M].

    Args:
        x: tokens [B, S, M].
        gates: weight of each chosen expert [B, S, C], in the dtype of x.
        experts: number of each chosen expert [B, S, C], int64.
        gate_weight: int8 [E, M, F], the matrix whose product goes through gelu.
        gate_scales: its scales [E, R, F].
        up_weight: int8 [E, M, F], the matrix whose product is multiplied.
        up_scales: its scales [E, R, F].
        down_weight: int8 [E, F, M].
        down_scales: its scales [E, R, M].
    """
    tokens = x.reshape(-1, x.shape[-1])
    chosen = experts.reshape(tokens.shape[0], -1)
    weight_of = gates.reshape(tokens.shape[0], -1).float()
    total = torch.zeros(tokens.shape[0], down_weight.shape[2])
    for expert in sorted(set(chosen.flatten().tolist())):
        row, place = torch.where(chosen == expert)
        inputs = tokens[row].float()
        gate = inputs @ dequantise(gate_weight[expert], gate_scales[expert], x.dtype).float()
        up = inputs @ dequantise(up_weight[expert], up_scales[expert], x.dtype).float()
        hidden = activation(gate.to(x.dtype).float(), up.to(x.dtype).float())
        down = hidden @ dequantise(down_weight[expert], down_scales[expert], x.dtype).float()
        total.index_add_(0, row, weight_of[row, place].unsqueeze(-1) * down)
    return total.reshape(*x.shape[:-1], -1).to(x.dtype)


@moe_experts.register_fake
def _(x: Tensor, *_rest: Tensor) -> Tensor:
    return torch.empty_like(x)
