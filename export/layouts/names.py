"""What other publishers of Grok-1 call its tensors: one table a layout.

In all of them a matrix is stored [out, in], experts are tensors of their own, layers are numbered.
"""

import re
from dataclasses import dataclass
from functools import cached_property

__all__ = ["EMBEDDING", "FINAL_NORM", "HEAD", "LAYOUTS", "ROUTER", "Layout", "Place"]

EMBEDDING, FINAL_NORM, ROUTER = "embedding.weight", "final_norm.scale", "router.weight"
# A copy of the embedding: the head of Grok-1 is no parameter of its own.
HEAD = "head.weight"

# What may stand beside the weights and says nothing of them.
_IGNORED = re.compile(r".*(\.input_scale|rotary_emb\.(inv_freq|cos_cached|sin_cached))")


@dataclass(frozen=True)
class Place:
    """Which tensor of the model a name stands for.

    Attributes:
        parameter: its name here, without the layer: `attention.query.weight`, or HEAD.
        layer: number of the layer, if it is in one.
        expert: number of the expert, if it is of one.
    """

    parameter: str
    layer: int | None = None
    expert: int | None = None

    @property
    def name(self) -> str:
        """Name of the parameter that it is, or that it is one expert of."""
        return self.parameter if self.layer is None else f"layers.{self.layer}.{self.parameter}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names of a layout.

    Attributes:
        name: of the layout.
        ends: names outside of layers, by parameter.
        layer: what names in a layer begin with.
        in_layer: the rest of them, by parameter without its layer.
    """

    name: str
    ends: dict[str, str]
    layer: str
    in_layer: dict[str, str]

    @cached_property
    def _templates(self) -> dict[str, str]:
        return self.ends | {ours: self.layer + name for ours, name in self.in_layer.items()}

    @cached_property
    def _patterns(self) -> dict[str, re.Pattern[str]]:
        def pattern(template: str) -> re.Pattern[str]:
            text = re.escape(template)
            for number in ("layer", "expert"):
                text = text.replace(rf"\{{{number}\}}", rf"(?P<{number}>0|[1-9]\d{{0,3}})")
            return re.compile(text)

        return {ours: pattern(template) for ours, template in self._templates.items()}

    def name_of(self, place: Place) -> str:
        """Return what the layout calls the tensor."""
        return self._templates[place.parameter].format(layer=place.layer, expert=place.expert)

    def place_of(self, name: str) -> Place | None:
        """Return what the layout calls so; None if it is no name of it."""
        for parameter, pattern in self._patterns.items():
            if found := pattern.fullmatch(name):
                return Place(parameter, **{key: int(n) for key, n in found.groupdict().items()})
        return None

    @staticmethod
    def ignores(name: str) -> bool:
        """Return whether a tensor may be there without being read."""
        return _IGNORED.fullmatch(name) is not None


# Source: hpcaitech/ColossalAI examples/language/grok-1, and copies of its modeling_grok1.py.
_HPCAI = Layout(
    name="hpcai",
    ends={
        EMBEDDING: "model.embed_tokens.weight",
        FINAL_NORM: "model.norm.scale",
        HEAD: "lm_head.weight",
    },
    layer="model.layers.{layer}.",
    in_layer={
        "attention.query.weight": "attn.q_proj.weight",
        "attention.key.weight": "attn.k_proj.weight",
        "attention.value.weight": "attn.v_proj.weight",
        "attention.out.weight": "attn.o_proj.weight",
        ROUTER: "moe_block.gate.weight",
        "experts.gate.weight": "moe_block.experts.{expert}.linear.weight",
        "experts.up.weight": "moe_block.experts.{expert}.linear_v.weight",
        "experts.down.weight": "moe_block.experts.{expert}.linear_1.weight",
        "pre_attn_norm.scale": "pre_attn_norm.scale",
        "post_attn_norm.scale": "post_attn_norm.scale",
        "pre_moe_norm.scale": "pre_moe_norm.scale",
        "post_moe_norm.scale": "post_moe_norm.scale",
    },
)

# Source: Aqwu/grok-1-hf convert_hf.py and modeling_grok.py; keyfan/grok-1-hf has the same names.
_KEYFAN = Layout(
    name="keyfan",
    ends={
        EMBEDDING: "transformer.in_out_embed.weight",
        FINAL_NORM: "transformer.rms_norm.weight",
        HEAD: "lm_head.weight",
    },
    layer="transformer.decoder_layer.{layer}.",
    in_layer={
        "attention.query.weight": "multi_head_attention.query.weight",
        "attention.key.weight": "multi_head_attention.key.weight",
        "attention.value.weight": "multi_head_attention.value.weight",
        "attention.out.weight": "multi_head_attention.linear.weight",
        ROUTER: "router.weight",
        "experts.gate.weight": "moe.{expert}.linear.weight",
        "experts.up.weight": "moe.{expert}.linear_v.weight",
        "experts.down.weight": "moe.{expert}.linear_1.weight",
        "pre_attn_norm.scale": "rms_norm.weight",
        "post_attn_norm.scale": "rms_norm_1.weight",
        "pre_moe_norm.scale": "rms_norm_2.weight",
        "post_moe_norm.scale": "rms_norm_3.weight",
    },
)

# Source: sgl-project/sglang python/sglang/srt/models/grok.py, which xai-org/grok-2 was made for.
_XAI = Layout(
    name="xai",
    ends={
        EMBEDDING: "model.embed_tokens.weight",
        FINAL_NORM: "model.norm.weight",
        HEAD: "lm_head.weight",
    },
    layer="model.layers.{layer}.",
    in_layer={
        "attention.query.weight": "self_attn.q_proj.weight",
        "attention.key.weight": "self_attn.k_proj.weight",
        "attention.value.weight": "self_attn.v_proj.weight",
        "attention.out.weight": "self_attn.o_proj.weight",
        ROUTER: "block_sparse_moe.gate.weight",
        "experts.gate.weight": "block_sparse_moe.experts.{expert}.w1.weight",
        "experts.up.weight": "block_sparse_moe.experts.{expert}.w3.weight",
        "experts.down.weight": "block_sparse_moe.experts.{expert}.w2.weight",
        "pre_attn_norm.scale": "pre_attn_norm.weight",
        "post_attn_norm.scale": "post_attn_norm.weight",
        "pre_moe_norm.scale": "pre_moe_norm.weight",
        "post_moe_norm.scale": "post_moe_norm.weight",
    },
)

LAYOUTS = (_HPCAI, _KEYFAN, _XAI)
