"""all_reduce -> trt::DistCollective, which TensorRT's parser takes for its collective layer.

Attributes are those that NVIDIA's polygraphy 0.53.6 gives such a node (multi_device.py). Elsewhere
the node means its function: of one rank alone.
"""

from typing import Any

import onnx_ir as ir
from onnx_ir.tape import Tape

from export_grok.plugins.lowered import attribute

__all__ = ["lower"]


def lower(node: ir.Node, graph: ir.Graph, tape: Tape) -> list[ir.Value]:
    """Put the nodes that compute `node` on the tape; return what stands for its outputs."""
    attributes: dict[str, Any] = {
        "collective_operation": "all_reduce",
        "reduce_op": "sum",
        "root": -1,
        "group_size": 0,
        "groups": ir.AttrInt64s("groups", []),
        "nb_rank": attribute(node, "ranks"),
    }
    y = tape.op("DistCollective", [node.inputs[0]], attributes, domain="trt", version=1)
    return [y]
