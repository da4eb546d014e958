"""Mistakes in the values of weights, and in which scales belong to which rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.plugins.int8_linear import reference as int8_linear
from export_grok.plugins.moe_experts import reference as moe_experts
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.graph import node_of, wrong_bodies
from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["FAULTS"]

Change = Callable[[NDArray[Any]], NDArray[Any]]

GROUPED = ("attention.out.scales", "experts.down.scales")
NORMS = tuple(
    f"{name}.scale"
    for name in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm", "final_norm")
)
BLOCK_BYTES = 4096


# ---- other values


def _reading(tensors: tuple[str, ...], change: Change) -> Callable[[Mistake], None]:
    """Return the mistake of reading these tensors of all layers as `change` makes them."""

    def read(name: str, array: NDArray[Any]) -> NDArray[Any]:
        return change(array) if name.endswith(tensors) else array

    return lambda mistake: mistake.read(read)


def _holding(tensors: tuple[str, ...], change: Change) -> Callable[[ir.Model, GrokConfig], None]:
    """Return the plant that has a graph hold these tensors itself, as `change` makes them."""

    def plant(model: ir.Model, config: GrokConfig) -> None:
        for name in tensors:
            value = model.graph.initializers.get(name)
            if value is not None and value.const_value is not None:
                array = np.ascontiguousarray(change(value.const_value.numpy()))
                value.const_value = ir.tensor(array, name=name)
                value.type = ir.TensorType(value.const_value.dtype)

    return plant


def _changed(
    name: str,
    title: str,
    *tensors: str,
    change: Change,
    shows: str,
    harmless: Callable[[GrokConfig], str | None] = lambda config: None,
) -> Fault:
    return Fault(
        name=name,
        title=title,
        graph="layer",
        shows=shows,
        mistake=_reading(tensors, change),
        plant=_holding(tensors, change),
        harmless=harmless,
    )


def _one_group(config: GrokConfig) -> str | None:
    groups = config.row_parallel_scale_groups
    return "its matrices have one group of scales each" if groups == 1 else None


def _first_group(scales: NDArray[Any]) -> NDArray[Any]:
    return np.broadcast_to(scales[..., :1, :], scales.shape)


def _next_group(scales: NDArray[Any]) -> NDArray[Any]:
    return np.roll(scales, -1, axis=-2)


def _larger(scales: NDArray[Any]) -> NDArray[Any]:
    return scales.astype(np.float32) * np.float32(1.01)


def _corrupted(matrix: NDArray[Any]) -> NDArray[Any]:
    """Return the matrix with every other bit of a block in its middle turned."""
    flat = matrix.reshape(-1).copy()
    length = min(BLOCK_BYTES, flat.size // 8)
    first = (flat.size - length) // 2
    flat[first : first + length] ^= 0x55
    return flat.reshape(matrix.shape)


# ---- groups of scales that are not blocks of rows


def _interleave_groups(mistake: Mistake) -> None:
    def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        groups = torch.arange(weight.shape[-2]) % scales.shape[-2]
        return (weight.float() * scales.float()[..., groups, :]).to(dtype)

    for module in (int8_linear, moe_experts):
        mistake.patch(module, "dequantise", dequantise)


def _plant_groups_interleaved(model: ir.Model, config: GrokConfig) -> None:
    out = node_of(model, "GrokInt8Linear", "attention.out.weight")
    body = wrong_bodies(model, out, node_of(model, "GrokMoeExperts"))["GrokDequantise"]
    scales = body.inputs[1]
    # The matrix becomes [..., K / R, R, N] instead of [..., R, K / R, N]; the scales go along.
    for node in body:
        if node.op_type == "Shape" and node.inputs[0] is scales:
            for name in node.attributes:
                node.attributes[name] = ir.AttrInt64(name, -2)
        elif node.op_type == "Unsqueeze" and node.inputs[1] is not None:
            axis = node.inputs[1].producer()
            if axis is not None:
                axis.attributes["value_ints"] = ir.AttrInt64s("value_ints", [-3])


FAULTS = (
    Fault(
        name="scale_groups_interleaved",
        title="row k has the scales of group k % R instead of k // (K / R)",
        graph="layer",
        shows="attention",
        mistake=_interleave_groups,
        plant=_plant_groups_interleaved,
        harmless=_one_group,
    ),
    _changed(
        "only_first_scale_group",
        "all rows have the scales of the first group",
        *GROUPED,
        change=_first_group,
        shows="attention",
        harmless=_one_group,
    ),
    _changed(
        "scales_of_the_next_group",
        "every group of rows has the scales of the next one",
        *GROUPED,
        change=_next_group,
        shows="attention",
        harmless=_one_group,
    ),
    _changed(
        "attention_query_1_percent_too_large",
        "the scales of attention.query are 1 % too large",
        "attention.query.scales",
        change=_larger,
        shows="heads",
    ),
    _changed(
        "attention_out_1_percent_too_large",
        "the scales of attention.out are 1 % too large, which the norm behind it hides",
        "attention.out.scales",
        change=_larger,
        shows="attention",
    ),
    _changed(
        "experts_down_1_percent_too_large",
        "the scales of experts.down are 1 % too large, which the norm behind it hides",
        "experts.down.scales",
        change=_larger,
        shows="moe",
    ),
    _changed(
        "gain_1_plus_scale",
        "the norms multiply by 1 + scale instead of scale",
        *NORMS,
        change=lambda scale: 1 + scale,
        shows="k_out",
    ),
    Fault(
        name="corrupted_block",
        title="a block of the bytes of attention.key is damaged",
        graph="layer",
        shows="k_out",
        mistake=None,
        plant=_holding(("attention.key.weight",), _corrupted),
    ),
)
