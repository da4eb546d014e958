"""Signature of moe_experts."""

from export_grok.plugins.op import Operand, OpSpec

__all__ = ["SPEC"]

SPEC = OpSpec(
    name="moe_experts",
    op_type="GrokMoeExperts",
    inputs=(
        Operand(name="x", shape="B S M"),
        Operand(name="gates", shape="B S C"),
        Operand(name="experts", shape="B S C", dtype="int64"),
        Operand(name="gate_weight", shape="E M F", dtype="int8"),
        Operand(name="gate_scales", shape="E R F", dtype="scale"),
        Operand(name="up_weight", shape="E M F", dtype="int8"),
        Operand(name="up_scales", shape="E R F", dtype="scale"),
        Operand(name="down_weight", shape="E F M", dtype="int8"),
        Operand(name="down_scales", shape="E R M", dtype="scale"),
    ),
    outputs=(Operand(name="y", shape="B S M"),),
)
