"""Mistakes in the norms and in the residual stream between them."""

from collections.abc import Callable

import onnx_ir as ir
import torch
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.export.model import DecoderLayer, RMSNorm
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.graph import inserted, norm_of, only, replaced
from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["FAULTS"]

EPS = 1e-6
POST_NORMS = ("post_attn_norm", "post_moe_norm")


def _plant_eps(model: ir.Model, config: GrokConfig) -> None:
    for node in model.graph:
        if node.op_type == "RMSNormalization":
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", EPS)


# ---- the post norms


def _layer(mistake: Mistake, add: Callable[[RMSNorm, Tensor, Tensor], Tensor]) -> None:
    def forward(
        self: DecoderLayer, h: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, k_cache, v_cache = self.attention(self.pre_attn_norm(h), start, k_cache, v_cache)
        h = add(self.post_attn_norm, h, y)
        x = self.pre_moe_norm(h)
        routing = self.router(x)
        h = add(self.post_moe_norm, h, self.experts(x, routing.gates, routing.experts))
        return h, k_cache, v_cache

    mistake.patch(DecoderLayer, "forward", forward)


def _plant_no_post_norms(model: ir.Model, config: GrokConfig) -> None:
    for name in POST_NORMS:
        norm = norm_of(model, name)
        y = norm.inputs[0]
        if y is None:
            raise AssertionError("a norm has an input")
        norm.outputs[0].replace_all_uses_with(y)


def _plant_norm_after_add(model: ir.Model, config: GrokConfig) -> None:
    for name in POST_NORMS:
        norm = norm_of(model, name)
        y, scale = norm.inputs[:2]
        add = only([user for user, _ in norm.outputs[0].uses()], f"Add behind {name}")
        terms = [y if value is norm.outputs[0] else value for value in add.inputs]
        norm.replace_input_with(0, inserted(norm, "Add", terms, like=y))
        # What a norm of this scale takes counts as the output of attention, or of the experts.
        norm.replace_input_with(1, inserted(norm, "Identity", [scale], like=scale))
        replaced(model, add, norm.outputs[0])


# ---- the residual stream


def _round_hidden(mistake: Mistake) -> None:
    original = DecoderLayer.forward

    def forward(
        self: DecoderLayer, h: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return original(self, h.to(torch.bfloat16).to(h.dtype), start, k_cache, v_cache)

    mistake.patch(DecoderLayer, "forward", forward)


def _plant_hidden_rounded(model: ir.Model, config: GrokConfig) -> None:
    hidden = model.graph.inputs[0]
    users = list(hidden.uses())
    first = next(iter(model.graph))
    short = inserted(first, "Cast", [hidden], {"to": ir.DataType.BFLOAT16}, like=None)
    rounded = inserted(first, "Cast", [short], {"to": ir.DataType.FLOAT}, like=hidden)
    for user, index in users:
        user.replace_input_with(index, rounded)


FAULTS = (
    Fault(
        name="activation_rounded_to_bfloat16",
        title="the residual stream is rounded to bfloat16 before the layer",
        graph="layer",
        shows="k_out",
        mistake=_round_hidden,
        plant=_plant_hidden_rounded,
    ),
    Fault(
        name="eps_1e_6",
        title="the norms' epsilon is 1e-6",
        graph="layer",
        shows="k_out",
        mistake=lambda mistake: mistake.configure(rms_norm_eps=EPS),
        plant=_plant_eps,
        harmless=lambda config: "1e-6 is its epsilon" if config.rms_norm_eps == EPS else None,
    ),
    Fault(
        name="no_post_norms",
        title="the norms behind attention and experts are left out",
        graph="layer",
        shows="experts",
        mistake=lambda mistake: _layer(mistake, lambda norm, h, y: h + y),
        plant=_plant_no_post_norms,
    ),
    Fault(
        name="post_norm_after_the_add",
        title="the norms behind attention and experts come after the residual addition",
        graph="layer",
        shows="experts",
        mistake=lambda mistake: _layer(mistake, lambda norm, h, y: norm(h + y)),
        plant=_plant_norm_after_add,
    ),
)
