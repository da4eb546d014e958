"""The formula of int8_linear in PyTorch, registered as torch op `grok1::int8_linear`.

    W[k, n] = round_T(weight[k, n] * scales[k // (K / R), n])
    y = round_T(x @ W)

T is the dtype of x; products and sums are float32. The original multiplies int8 by bfloat16 scales
in bfloat16 (NUMERICS: jaxpr of xai-org/grok-1 model.py, `Linear`); both factors are exact in
float32, so one rounding of the float32 product gives the same bits.
"""

import torch
from torch import Tensor

__all__ = ["dequantise", "int8_linear"]


def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix of int8 `weight` [..., K, N] and `scales` [..., R, N], in `dtype`.

    Row k has the scales of group k // (K / R): groups are blocks of neighbouring rows.
    """
    grouped = weight.float().view(*scales.shape[:-1], -1, scales.shape[-1])
    return (grouped * scales.float().unsqueeze(-2)).flatten(-3, -2).to(dtype)


@torch.library.custom_op("grok1::int8_linear", mutates_args=())
def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return x [..., K] times the matrix of int8 `weight` [K, N] and `scales` [R, N]: [..., N]."""
    matrix = dequantise(weight, scales, x.dtype)
    return (x.float() @ matrix.float()).to(x.dtype)


@int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])
