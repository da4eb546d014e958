"""The collective node as an ONNX function: of one rank alone, whose sum is what it has."""

# onnxscript reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors

from onnxscript import FLOAT, script, values
from onnxscript.onnx_opset import opset24 as op

__all__ = ["FUNCTIONS"]

COLLECTIVES = values.Opset("trt", 1)


@script(COLLECTIVES, default_opset=op)
def DistCollective(x: FLOAT[...]) -> FLOAT[...]:  # noqa: N802
    return op.Identity(x)


FUNCTIONS = (DistCollective,)
