"""Lower a graph to the kernels of ONNX Runtime's CPU provider."""

import onnx_ir as ir

from export_grok.engines.lowering import LoweringReport, lower_ops
from export_grok.errors import BuildError

__all__ = ["lower_graph"]


def lower_graph(model: ir.Model, *, dtype: str) -> LoweringReport:
    """Lower the graph in place and return what became of its ops.

    Raises:
        BuildError: the graph's dtype has no kernels on a CPU.
    """
    if dtype != "float32":
        raise BuildError(
            f"the graphs are {dtype}; ONNX Runtime has CPU kernels for float32 only: "
            "export them with --dtype float32"
        )
    return lower_ops(model, "ort")
