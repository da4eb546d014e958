"""Makes the ops known to ONNX: schemas, what the exporter emits for them, and their bodies."""

from collections.abc import Callable
from typing import Any

import onnx.defs
import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from export_grok.plugins.op import DOMAIN, VERSION, Operand, OpSpec
from export_grok.plugins.registry import op_names, part, spec

__all__ = ["attach_functions", "register_schemas", "translation_table"]

_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_ATTRIBUTE_TYPES = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT}


def register_schemas() -> None:
    """Tell `onnx` the signature of every op, once a process."""
    for name in op_names():
        found = spec(name)
        if not onnx.defs.has(found.op_type, DOMAIN):
            onnx.defs.register_schema(_schema(found))


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return, for torch.onnx.export, which node each torch op becomes: a bare node, no body."""
    register_schemas()
    table = {}
    for name in op_names():
        part(name, "reference")  # registers the torch op
        operator = getattr(getattr(torch.ops, DOMAIN), name).default
        table[operator] = part(name, "onnx_function").translate
    return table


def attach_functions(model: ir.Model) -> None:
    """Give the model the body of every op it uses, so that any backend can run it."""
    for name in op_names():
        for body in part(name, "onnx_function").FUNCTIONS:
            function = ir.serde.deserialize_function(body.to_function_proto())
            model.functions[function.identifier()] = function
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # not typed there
    if model.functions:
        model.graph.opset_imports[DOMAIN] = VERSION


def _schema(found: OpSpec) -> OpSchema:
    # Each scale operand has a type variable of its own: scales may differ in dtype.
    variables = {
        operand.name: f"S{index}"
        for index, operand in enumerate(found.inputs)
        if operand.dtype == "scale"
    }

    def parameter(operand: Operand) -> OpSchema.FormalParameter:
        variable = variables.get(operand.name, "T")
        known = operand.dtype in ("T", "scale")
        kind = variable if known else f"tensor({operand.dtype})"
        return OpSchema.FormalParameter(operand.name, kind)

    return OpSchema(
        found.op_type,
        DOMAIN,
        VERSION,
        inputs=[parameter(operand) for operand in found.inputs],
        outputs=[parameter(operand) for operand in found.outputs],
        type_constraints=[(name, _FLOATS, "") for name in ("T", *variables.values())],
        attributes=[
            OpSchema.Attribute(name, _ATTRIBUTE_TYPES[kind], required=True)
            for name, kind in found.attributes.items()
        ],
    )
