"""Signature of int8_linear."""

from export_grok.plugins.op import Operand, OpSpec

__all__ = ["SPEC"]

SPEC = OpSpec(
    name="int8_linear",
    op_type="GrokInt8Linear",
    inputs=(
        Operand(name="x", shape="... K"),
        Operand(name="weight", shape="K N", dtype="int8"),
        Operand(name="scales", shape="R N", dtype="scale"),
    ),
    outputs=(Operand(name="y", shape="... N"),),
)
