"""Plugin nodes in an ONNX graph: how one is put there, and what it is called with."""

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from export_grok.config import Dtype
from export_grok.plugins.lowered import fixed_shape
from export_grok.plugins.op import DOMAIN
from export_grok.plugins.plugin_node import Attributes, Call, PluginNode, StoredScale
from export_grok.plugins.registry import plugin_nodes

__all__ = ["plugin_calls", "plugin_node"]

_DTYPES: dict[ir.DataType, Dtype] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}
_IR_DTYPES = {name: number for number, name in _DTYPES.items()}


def plugin_node(
    tape: Tape,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Attributes | None = None,
) -> list[ir.Value]:
    """Put a node on the tape that TensorRT takes for its plugin; return its outputs.

    Its parser looks for a plugin where a node names the namespace of one. Others run the function.

    Raises:
        NotLowered: the shape of an input is not fixed.
    """
    node, given = plugin_nodes()[op_type], dict(attributes or {})
    named = {"plugin_namespace": DOMAIN, "plugin_version": "1", **given}
    call = _call(node, inputs, given)
    values = tape.op_multi_out(
        op_type, inputs, named, num_outputs=len(node.outputs), domain=DOMAIN
    )
    for value, row, shape in zip(values, node.outputs, node.output_shapes(call), strict=True):
        value.shape = ir.Shape(shape)
        value.type = ir.TensorType(_IR_DTYPES["float32" if row.dtype == "float32" else call.dtype])
    return list(values)


def plugin_calls(graph: ir.Graph) -> Iterator[tuple[PluginNode, Call]]:
    """Yield every plugin node of a lowered graph with what it is called with."""
    nodes = plugin_nodes()
    for node in graph:
        kind = nodes.get(node.op_type)
        if kind is not None and node.domain == DOMAIN:
            attributes = {name: node.attributes[name].value for name in kind.attributes}
            yield kind, _call(kind, node.inputs, attributes)


def _call(node: PluginNode, inputs: Sequence[ir.Value | None], attributes: Attributes) -> Call:
    dtype, scales = _DTYPES.get(ir.DataType(int(attributes.get("to", 0)))), None
    for row, value in zip(node.inputs, inputs, strict=True):
        found = _DTYPES.get(value.dtype) if value is not None and value.dtype is not None else None
        if row.dtype == "T":
            dtype = found
        elif row.dtype == "scale":
            scales = found
    if dtype is None:
        raise AssertionError(f"the dtype of {node.op_type} follows from none of its inputs")
    stored: StoredScale = scales or "bfloat16"
    # A file has float32, and so TensorRT: a kernel made for another number would not be found.
    attributes = {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in attributes.items()
    }
    shapes = {row.name: fixed_shape(value) for row, value in zip(node.inputs, inputs, strict=True)}
    return Call(shapes=shapes, attributes=attributes, dtype=dtype, scales=stored)
