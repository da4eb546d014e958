"""Mistakes in attention: its cap and scale, and which head reads which."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.plugins.softcap_attention import reference as softcap_attention
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.graph import (
    inserted,
    node_of,
    numbers,
    only,
    wrong_bodies,
)
from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["FAULTS"]

Op = Callable[..., Tensor]

CAP = 20.0


def _set(model: ir.Model, name: str, value: float) -> None:
    node = node_of(model, "GrokSoftcapAttention")
    node.attributes[name] = ir.AttrFloat32(name, value)


# ---- the cap


def _no_cap(mistake: Mistake) -> None:
    mistake.patch(softcap_attention, "soft_cap", lambda logits, cap: logits)


def _plant_no_cap(model: ir.Model, config: GrokConfig) -> None:
    body = wrong_bodies(model, node_of(model, "GrokSoftcapAttention"))["GrokSoftcapAttention"]
    tanh = only([node for node in body if node.op_type == "Tanh"], "Tanh of the soft cap")
    capped = only([user for user, _ in tanh.outputs[0].uses()], "cap * tanh").outputs[0]
    ratio = tanh.inputs[0]
    quotient = None if ratio is None else ratio.producer()
    scaled = None if quotient is None else quotient.inputs[0]
    if scaled is None:
        raise AssertionError("tanh is taken of logits / cap")
    capped.replace_all_uses_with(scaled)


# ---- the scale


def _root_of_head_size(mistake: Mistake) -> None:
    mistake.configure(attn_output_multiplier=mistake.config.key_size**-0.5)


def _plant_root_of_head_size(model: ir.Model, config: GrokConfig) -> None:
    _set(model, "scale", config.key_size**-0.5)


def _is_root_of_head_size(config: GrokConfig) -> str | None:
    multiplier = config.attn_output_multiplier
    if math.isclose(multiplier, config.key_size**-0.5, rel_tol=1e-6):
        return f"1/sqrt({config.key_size}) is its multiplier, {multiplier}"
    return None


# ---- which head reads which


def _split(x: Tensor, *sizes: int) -> Tensor:
    """Return x with its last axis cut into axes of these sizes."""
    return x.reshape(*x.shape[:-1], *sizes)


def _stride_heads(mistake: Mistake) -> None:
    heads, shared = mistake.config.num_q_heads, mistake.config.num_kv_heads

    def strided(op: Op, query: Tensor, *rest: Any) -> Tensor:
        """Query head h reads key/value head h % Hkv."""
        grouped = _split(query, heads // shared, shared, -1).transpose(2, 3).flatten(2)
        y = op(grouped, *rest)
        return _split(y, shared, heads // shared, -1).transpose(2, 3).flatten(2)

    mistake.attend(strided)


def _plant_heads_strided(model: ir.Model, config: GrokConfig) -> None:
    node = node_of(model, "GrokSoftcapAttention")
    groups = config.num_q_heads // config.num_kv_heads

    def exchanged(before: ir.Node, x: ir.Value | None, outer: int, inner: int) -> ir.Value:
        """Return x [B, S, outer * inner * D] with outer and inner exchanged."""
        name = f"heads_{outer}_{inner}"
        cut = numbers(model, name, [0, 0, outer, inner, config.key_size], np.int64)
        flat = numbers(model, "heads_flat", [0, 0, -1], np.int64)
        apart = inserted(before, "Reshape", [x, cut], like=None)
        other = inserted(before, "Transpose", [apart], {"perm": [0, 1, 3, 2, 4]}, like=None)
        return inserted(before, "Reshape", [other, flat], like=x)

    query, y = node.inputs[0], node.outputs[0]
    node.replace_input_with(0, exchanged(node, query, groups, config.num_kv_heads))
    users = list(y.uses())
    back = exchanged(users[0].node, y, config.num_kv_heads, groups)
    for user, index in users:
        user.replace_input_with(index, back)


def _same_strided(config: GrokConfig) -> str | None:
    heads, shared = config.num_q_heads, config.num_kv_heads
    if shared in (1, heads):
        return f"{heads} query heads read {shared} key/value heads, in any order the same"
    return None


FAULTS = (
    Fault(
        name="no_attention_soft_cap",
        title="attention logits are not capped",
        graph="layer",
        shows="heads",
        mistake=_no_cap,
        plant=_plant_no_cap,
    ),
    Fault(
        name="cap_of_20",
        title="attention logits are capped at 20",
        graph="layer",
        shows="heads",
        mistake=lambda mistake: mistake.configure(attn_logit_cap=CAP),
        plant=lambda model, config: _set(model, "cap", CAP),
        harmless=lambda config: "20 is its cap" if config.attn_logit_cap == CAP else None,
    ),
    Fault(
        name="root_of_head_size_for_multiplier",
        title="attention logits are scaled by 1/sqrt(head size) instead of the multiplier",
        graph="layer",
        shows="heads",
        mistake=_root_of_head_size,
        plant=_plant_root_of_head_size,
        harmless=_is_root_of_head_size,
    ),
    Fault(
        name="query_heads_strided_over_kv_heads",
        title="query head h reads key/value head h % Hkv instead of h // G",
        graph="layer",
        shows="heads",
        mistake=_stride_heads,
        plant=_plant_heads_strided,
        harmless=_same_strided,
    ),
)
