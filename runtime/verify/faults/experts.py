"""Mistakes in the experts: their activation, and which matrix is which."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from export_grok.config import GrokConfig
from export_grok.plugins.moe_experts import reference as moe_experts
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

WEIGHTS = range(3, 9)  # the inputs of the experts' op: gate, up, down, each with its scales


# ---- the activation


def _activate(mistake: Mistake, activation: Callable[[Tensor], Tensor]) -> None:
    mistake.patch(moe_experts, "activation", lambda gate, up: activation(gate) * up)


def _gelu(model: ir.Model) -> tuple[ir.Function, ir.Node]:
    """Return the body that the experts run by from now on, and the activation in it."""
    body = wrong_bodies(model, node_of(model, "GrokMoeExperts"))["GrokMoeExperts"]
    return body, only([node for node in body if node.op_type == "Gelu"], "Gelu of the experts")


def _plant_exact(model: ir.Model, config: GrokConfig) -> None:
    _, gelu = _gelu(model)
    gelu.attributes["approximate"] = ir.AttrString("approximate", "none")


def _plant_silu(model: ir.Model, config: GrokConfig) -> None:
    body, gelu = _gelu(model)
    gate = gelu.inputs[0]
    sigmoid = ir.node("Sigmoid", [gate])
    silu = ir.node("Mul", [gate, sigmoid.outputs[0]])
    sigmoid.outputs[0].name, silu.outputs[0].name = "sigmoid", "silu"
    ir.convenience.replace_nodes_and_values(
        body, gelu, [gelu], [sigmoid, silu], gelu.outputs, silu.outputs
    )


# ---- which matrix is which


def _swap_names(mistake: Mistake) -> None:
    other = {"gate": "up", "up": "gate"}

    def swapped(name: str) -> str:
        return ".".join(
            other.get(word, word) if "experts" in name else word for word in name.split(".")
        )

    mistake.rename(swapped)


def _plant_swapped(model: ir.Model, config: GrokConfig) -> None:
    node = node_of(model, "GrokMoeExperts")
    for gate, up in ((3, 5), (4, 6)):
        first, second = node.inputs[gate], node.inputs[up]
        node.replace_input_with(gate, second)
        node.replace_input_with(up, first)


def _order(experts: int) -> list[int]:
    return [1, 0, *range(2, experts)]


def _exchange_two(mistake: Mistake) -> None:
    order = _order(mistake.config.num_experts)

    def exchanged(name: str, array: NDArray[Any]) -> NDArray[Any]:
        return array[order] if ".experts." in name else array

    mistake.read(exchanged)


def _plant_two_exchanged(model: ir.Model, config: GrokConfig) -> None:
    node = node_of(model, "GrokMoeExperts")
    order = numbers(model, "experts", _order(config.num_experts), np.int64)
    for index in WEIGHTS:
        weight = node.inputs[index]
        taken = inserted(node, "Gather", [weight, order], {"axis": 0}, like=weight)
        node.replace_input_with(index, taken)


FAULTS = (
    Fault(
        name="exact_gelu",
        title="the experts' gelu is the exact one (erf) instead of its tanh form",
        graph="layer",
        shows="moe",
        mistake=lambda mistake: _activate(mistake, functional.gelu),
        plant=_plant_exact,
    ),
    Fault(
        name="silu_for_gelu",
        title="the experts' activation is silu instead of gelu",
        graph="layer",
        shows="moe",
        mistake=lambda mistake: _activate(mistake, functional.silu),
        plant=_plant_silu,
    ),
    Fault(
        name="linear_and_linear_v_swapped",
        title="gelu is taken of the experts' other product",
        graph="layer",
        shows="moe",
        mistake=_swap_names,
        plant=_plant_swapped,
    ),
    Fault(
        name="two_experts_exchanged",
        title="experts 0 and 1 have each other's matrices",
        graph="layer",
        shows="moe",
        mistake=_exchange_two,
        plant=_plant_two_exchanged,
        harmless=lambda config: "there is one expert" if config.num_experts == 1 else None,
    ),
)
