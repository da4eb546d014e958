"""Mistakes in writing the cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.graph import inserted, node_of, numbers, wrong_bodies
from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["FAULTS"]

Op = Callable[..., Tensor]

TO_THE_END = 2**62


# ---- the slot at `start` is not written


def _keep_first_slot(mistake: Mistake) -> None:
    def stale(
        op: Op, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, *rest: Any
    ) -> Tensor:
        start = rest[1]
        old = k_cache[torch.arange(len(start)), :, start].flatten(1).to(key.dtype)
        return op(query, torch.cat([old[:, None], key[:, 1:]], 1), value, k_cache, *rest)

    mistake.attend(stale)


def _plant_first_slot_kept(model: ir.Model, config: GrokConfig) -> None:
    node = node_of(model, "GrokSoftcapAttention")
    key, cache, start = node.inputs[1], node.inputs[3], node.inputs[5]
    axis, one = numbers(model, "axis_1", [1], np.int64), numbers(model, "one", [1], np.int64)
    flat = numbers(model, "key_flat", [0, 1, -1], np.int64)
    end = numbers(model, "end", [TO_THE_END], np.int64)
    by_slot = inserted(node, "Transpose", [cache], {"perm": [0, 2, 1, 3]}, like=None)
    place = inserted(
        node, "Reshape", [start, numbers(model, "places", [-1, 1, 1], np.int64)], like=None
    )
    slots = inserted(node, "GatherND", [by_slot, place], {"batch_dims": 1}, like=None)
    old = inserted(node, "Reshape", [slots, flat], like=None)
    rest = inserted(node, "Slice", [key, one, end, axis], like=None)
    node.replace_input_with(1, inserted(node, "Concat", [old, rest], {"axis": 1}, like=key))


# ---- one slot more is written


def _write_too_far(mistake: Mistake) -> None:
    def too_far(
        op: Op, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, *rest: Any
    ) -> Tensor:
        y = op(query, key, value, k_cache, *rest)
        rows, heads, slots, _ = k_cache.shape
        slot = (rest[1] + key.shape[1]).clamp(max=slots - 1)
        k_cache[torch.arange(rows), :, slot] = key[:, -1].reshape(rows, heads, -1)
        return y

    mistake.attend(too_far)


def _plant_too_far(model: ir.Model, config: GrokConfig) -> None:
    body = wrong_bodies(model, node_of(model, "GrokSoftcapAttention"))["GrokSoftcapAttention"]
    written = body.outputs[1]
    scatter = written.producer()
    if scatter is None:
        raise AssertionError("the keys are written")
    cache, keys, start = scatter.inputs[:3]
    new: list[ir.Node] = []

    def op(op_type: str, inputs: list[ir.Value | None], **attributes: Any) -> ir.Value:
        new.append(ir.node(op_type, inputs, attributes))
        output = new[-1].outputs[0]
        output.name = f"fault_{len(new)}"
        return output

    last, one = op("Constant", [], value_ints=[-1]), op("Constant", [], value_ints=[1])
    end, axis = op("Constant", [], value_ints=[TO_THE_END]), op("Constant", [], value_ints=[2])
    last_key = op("Slice", [keys, last, end, axis])
    tokens, slots = op("Shape", [keys], start=2, end=3), op("Shape", [cache], start=2, end=3)
    # A cache that is full has no slot behind: its last one gets what it has.
    slot = op("Min", [op("Add", [start, tokens]), op("Sub", [slots, one])])
    body.outputs[1] = op("TensorScatter", [written, last_key, slot], axis=2, mode="linear")
    written.name, body.outputs[1].name = "k_written", "k_out"
    body.extend(new)


FAULTS = (
    Fault(
        name="stale_cache_slot",
        title="the key of a row's first new token is not written: its slot keeps the old one",
        graph="layer",
        shows="k_out",
        mistake=_keep_first_slot,
        plant=_plant_first_slot_kept,
    ),
    Fault(
        name="a_slot_too_far",
        title="keys are also written to the slot behind the last new token",
        graph="layer",
        shows="k_out",
        mistake=_write_too_far,
        plant=_plant_too_far,
    ),
)
