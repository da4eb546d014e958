"""Mistakes in the router: how the chosen experts are weighed."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.export.model import Router, Routing
from export_grok.plugins.softcap_attention import reference as softcap_attention
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.graph import inserted, node_of, numbers, only
from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["FAULTS"]

GATES = 1  # the input of the experts' op


def _routing(mistake: Mistake, change: Callable[[Routing], Routing]) -> None:
    original = Router.forward
    mistake.patch(Router, "forward", lambda self, x: change(original(self, x)))


# ---- renormalised


def _renormalise(mistake: Mistake) -> None:
    _routing(mistake, lambda r: r._replace(gates=r.gates / r.gates.sum(-1, keepdim=True)))


def _plant_renormalised(model: ir.Model, config: GrokConfig) -> None:
    node = node_of(model, "GrokMoeExperts")
    gates = node.inputs[GATES]
    last = numbers(model, "last_axis", [-1], np.int64)
    total = inserted(node, "ReduceSum", [gates, last], {"keepdims": 1}, like=None)
    node.replace_input_with(GATES, inserted(node, "Div", [gates, total], like=gates))


# ---- the first expert alone


def _first(config: GrokConfig) -> list[float]:
    return [1.0, *[0.0] * (config.num_selected_experts - 1)]


def _take_one(mistake: Mistake) -> None:
    first: Tensor = torch.tensor(_first(mistake.config))
    _routing(mistake, lambda r: r._replace(gates=r.gates * first))


def _plant_one(model: ir.Model, config: GrokConfig) -> None:
    node = node_of(model, "GrokMoeExperts")
    gates = node.inputs[GATES]
    first = numbers(model, "first_expert", _first(config))
    node.replace_input_with(GATES, inserted(node, "Mul", [gates, first], like=gates))


# ---- soft-capped


def _cap_logits(mistake: Mistake) -> None:
    cap = mistake.config.attn_logit_cap

    def capped(found: Routing) -> Routing:
        logits = softcap_attention.soft_cap(found.logits, cap)
        probabilities = torch.softmax(logits, dim=-1)
        gates = probabilities.gather(-1, found.experts)
        return Routing(logits, probabilities, gates, found.experts)

    _routing(mistake, capped)


def _plant_capped(model: ir.Model, config: GrokConfig) -> None:
    logits = node_of(model, "MatMul", "router.weight").outputs[0]
    softmax = only([user for user, _ in logits.uses()], "Softmax of the router")
    cap = numbers(model, "router_cap", config.attn_logit_cap)
    ratio = inserted(softmax, "Div", [logits, cap], like=logits)
    bent = inserted(softmax, "Tanh", [ratio], like=logits)
    softmax.replace_input_with(0, inserted(softmax, "Mul", [cap, bent], like=logits))


FAULTS = (
    Fault(
        name="gates_renormalised",
        title="the gates of the chosen experts are divided by their sum",
        graph="layer",
        shows="gates",
        mistake=_renormalise,
        plant=_plant_renormalised,
        harmless=lambda config: (
            "all experts are chosen: their gates have the sum 1"
            if config.num_selected_experts == config.num_experts
            else None
        ),
    ),
    Fault(
        name="top_1_only",
        title="only the most probable expert counts",
        graph="layer",
        shows="gates",
        mistake=_take_one,
        plant=_plant_one,
        harmless=lambda config: (
            "one expert is chosen" if config.num_selected_experts == 1 else None
        ),
    ),
    Fault(
        name="router_soft_capped",
        title="the router's logits are capped as those of attention are",
        graph="layer",
        shows="gates",
        mistake=_cap_logits,
        plant=_plant_capped,
    ),
)
