"""Mistakes in rotary positions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.export import model as model_module
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.graph import inserted, node_of, numbers, only
from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["FAULTS"]

Rotate = Callable[[Tensor, Tensor, int, float], Tensor]
Op = Callable[..., Tensor]


def _rotary(mistake: Mistake, change: Callable[[Rotate], Rotate]) -> None:
    rotate = model_module.rotary_embedding
    mistake.patch(model_module, "rotary_embedding", change(rotate))


def _phase(model: ir.Model) -> tuple[ir.Node, int, ir.Value]:
    """Return what multiplies positions by frequencies, and its input of positions [B, S, 1]."""
    angles = [node.inputs[0] for node in model.graph if node.op_type in ("Cos", "Sin")]
    products = {value.producer() for value in angles if value is not None}
    node = only([node for node in products if node is not None], "the phase of rotary positions")
    for index, value in enumerate(node.inputs):
        if value is not None and not value.is_initializer():
            return node, index, value
    raise AssertionError("positions are computed")


def _moved(model: ir.Model, amount: Callable[[ir.Node], ir.Value]) -> None:
    """Add to all positions what `amount` puts before the node that takes them."""
    node, index, position = _phase(model)
    moved = inserted(node, "Add", [position, amount(node)], like=position)
    node.replace_input_with(index, moved)


# ---- interleaved


def _interleave(mistake: Mistake) -> None:
    def change(rotate: Rotate) -> Rotate:
        def interleaved(x: Tensor, position: Tensor, head_size: int, base: float) -> Tensor:
            lead = x.shape[:2]
            halves = x.reshape(*lead, -1, head_size // 2, 2).transpose(-1, -2).flatten(2)
            turned = rotate(halves, position, head_size, base)
            return turned.reshape(*lead, -1, 2, head_size // 2).transpose(-1, -2).flatten(2)

        return interleaved

    _rotary(mistake, change)


def _plant_interleaved(model: ir.Model, config: GrokConfig) -> None:
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1)


# ---- off by one


def _start_at_1(mistake: Mistake) -> None:
    def change(rotate: Rotate) -> Rotate:
        return lambda x, position, size, base: rotate(x, position + 1, size, base)

    _rotary(mistake, change)


def _plant_start_at_1(model: ir.Model, config: GrokConfig) -> None:
    _moved(model, lambda node: numbers(model, "next_position", 1.0))


def _late_in_decode(mistake: Mistake) -> None:
    def change(rotate: Rotate) -> Rotate:
        def late(x: Tensor, position: Tensor, size: int, base: float) -> Tensor:
            return rotate(x, position + 1 if x.shape[1] == 1 else position, size, base)

        return late

    _rotary(mistake, change)


def _plant_late_in_decode(model: ir.Model, config: GrokConfig) -> None:
    def amount(node: ir.Node) -> ir.Value:
        hidden = model.graph.inputs[0]
        tokens = inserted(node, "Shape", [hidden], {"start": 1, "end": 2}, like=None)
        one = numbers(model, "one_token", [1], np.int64)
        single = inserted(node, "Equal", [tokens, one], like=None)
        return inserted(node, "Cast", [single], {"to": ir.DataType.FLOAT}, like=None)

    _moved(model, amount)


# ---- values turned


def _turn_values(mistake: Mistake) -> None:
    config, rotate = mistake.config, model_module.rotary_embedding

    def turned(op: Op, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        start = rest[2]
        position = start[:, None] + torch.arange(value.shape[1])
        value = rotate(value, position, config.key_size, config.rope_base)
        return op(query, key, value, *rest)

    mistake.attend(turned)


def _plant_values_turned(model: ir.Model, config: GrokConfig) -> None:
    attention = node_of(model, "GrokSoftcapAttention")
    key, value = attention.inputs[1], attention.inputs[2]
    rotary = None if key is None else key.producer()
    found = only([] if rotary is None else [rotary], "RotaryEmbedding of the keys")
    heads = {"num_heads": config.num_kv_heads}
    turned = inserted(attention, "RotaryEmbedding", [value, *found.inputs[1:]], heads, like=value)
    attention.replace_input_with(2, turned)


FAULTS = (
    Fault(
        name="interleaved_rope",
        title="rotary positions turn neighbouring channels together, not those of two halves",
        graph="layer",
        shows="k_out",
        mistake=_interleave,
        plant=_plant_interleaved,
        harmless=lambda config: (
            "a head of 2 channels has one pair only" if config.key_size == 2 else None
        ),
    ),
    Fault(
        name="positions_start_at_1",
        title="the first token of a row has position 1; only the cached keys tell",
        graph="layer",
        shows="k_out",
        mistake=_start_at_1,
        plant=_plant_start_at_1,
    ),
    Fault(
        name="decode_position_off_by_one",
        title="a token that comes alone has the position of the next one",
        graph="layer",
        shows="k_out",
        mistake=_late_in_decode,
        plant=_plant_late_in_decode,
    ),
    Fault(
        name="v_rotated",
        title="values are turned by their positions, as keys are",
        graph="layer",
        shows="v_out",
        mistake=_turn_values,
        plant=_plant_values_turned,
    ),
)
