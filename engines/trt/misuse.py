"""How a node of a graph differs from the plugin that it is to become."""

from collections.abc import Iterator
from typing import Any, Final

import onnx_ir as ir

from export_grok.plugins.op import DOMAIN, VERSION
from export_grok.plugins.plugin_node import PluginNode

__all__ = ["attribute", "misuse"]

FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
DTYPES: Final = {
    "T": FLOATS,
    "scale": FLOATS,
    "float32": (ir.DataType.FLOAT,),
    "int8": (ir.DataType.INT8,),
    "int64": (ir.DataType.INT64,),
}
ATTRIBUTE_TYPES: Final = {int: ir.AttributeType.INT, float: ir.AttributeType.FLOAT}


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Return an attribute's value; None for one that a function gets from its caller."""
    return node.attributes[name].value if name in node.attributes else default


def misuse(node: ir.Node, spec: PluginNode) -> Iterator[str]:
    """Yield how a node differs from the plugin, one line each.

    A kernel gets bare pointers: a wrong dtype would be read as what it is not.
    """
    for name, wanted in (("plugin_namespace", DOMAIN), ("plugin_version", str(VERSION))):
        if attribute(node, name) != wanted:
            yield f"{name} is {attribute(node, name)!r}, must be {wanted!r}"
    types = {name: ATTRIBUTE_TYPES[kind] for name, kind in spec.attributes.items()}
    found = {
        name: given.type
        for name, given in node.attributes.items()
        if name not in ("plugin_namespace", "plugin_version")
    }
    if found != types:
        yield f"attributes are {_listed(found)}, must be {_listed(types)}"
    for direction, values, rows in (
        ("inputs", node.inputs, spec.inputs),
        ("outputs", node.outputs, spec.outputs),
    ):
        if len(values) != len(rows) or None in values:
            yield f"{direction} are {len(values)}, must be {[row.name for row in rows]}"
    rows = (*spec.inputs, *spec.outputs)
    kinds = [
        (row, value.dtype)
        for row, value in zip(rows, (*node.inputs, *node.outputs), strict=False)
        if value is not None and value.dtype is not None
    ]
    for row, dtype in kinds:
        if dtype not in DTYPES[row.dtype]:
            yield f"{row.name} is {dtype}, must be {row.dtype}"
    if len(chosen := {str(dtype) for row, dtype in kinds if row.dtype == "T"}) > 1:
        yield f"T is {' and '.join(sorted(chosen))}; it must be one dtype"


def _listed(types: dict[str, ir.AttributeType]) -> str:
    return ", ".join(f"{name}: {kind.name}" for name, kind in sorted(types.items())) or "none"
