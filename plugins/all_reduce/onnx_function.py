"""all_reduce as an ONNX function: of one rank alone, whose sum is what it has.

No standard op talks to other processes. Graphs run by this body give each rank's own part.
"""

# onnxscript reads the bodies below as a language of its own; they are no typed Python.
# mypy: ignore-errors

from onnxscript import FLOAT, script, values
from onnxscript.onnx_opset import opset24 as op

from export_grok.plugins.op import DOMAIN, VERSION

__all__ = ["FUNCTIONS", "translate"]

GROK = values.Opset(DOMAIN, VERSION)


@script(GROK, default_opset=op)
def GrokAllReduce(x: FLOAT[...], ranks: int) -> FLOAT[...]:  # noqa: N802
    return op.Identity(x)


FUNCTIONS = (GrokAllReduce,)


def translate(x, ranks: int):
    """Return the node that torch op `grok1::all_reduce` becomes."""
    return GROK.GrokAllReduce(x, ranks=ranks)
