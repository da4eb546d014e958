"""Signature of all_reduce."""

from export_grok.plugins.op import Operand, OpSpec

__all__ = ["SPEC"]

SPEC = OpSpec(
    name="all_reduce",
    op_type="GrokAllReduce",
    inputs=(Operand(name="x", shape="B S M"),),
    outputs=(Operand(name="y", shape="B S M"),),
    attributes={"ranks": int},
)
