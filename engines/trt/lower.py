"""Lower a template to what TensorRT builds: fixed shapes, plugin nodes, weights as inputs.

The weights stay network inputs, so one plan serves every layer and every rank. The graph keeps the
function bodies of its plugin nodes: ONNX Runtime runs it by them, and TensorRT-RTX builds it.
"""

import math

import onnx_ir as ir
import onnxscript.optimizer
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from export_grok.config import Dtype
from export_grok.engines.lowering import lower_ops
from export_grok.engines.trt.record import Phase, Sizes
from export_grok.errors import BuildError
from export_grok.export.contract import GraphKind
from export_grok.plugins.registry import lowering, op_names, part

__all__ = ["lower_template"]

_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
# The table of the vocabulary, by graph: the original rounds it to T before it is used.
_TABLES = {"embedding": "weight", "head": "embedding.weight", "head_all": "embedding.weight"}


def lower_template(
    template: ir.Model, kind: GraphKind, dtype: Dtype, sizes: Sizes, phase: Phase
) -> ir.Model:
    """Return the graph of one kind for one phase.

    Args:
        template: as `export.trace.template_from_config` makes it, for `sizes.tensor_parallel`.
        kind: of the template.
        dtype: of the template.
        sizes: of the graph.
        phase: decode or prefill.

    Raises:
        BuildError: an op has no lowering.
    """
    model = template.clone()
    batch, tokens = sizes.rows(phase)
    _fix_shapes(model, {"B": batch, "S": tokens, "T": sizes.slots})
    if kind in _TABLES:
        _store(model, _TABLES[kind], _DTYPES[dtype])
    onnxscript.optimizer.optimize_ir(model, inline=False)
    _multiply_as_stored(model, _DTYPES[dtype])
    report = lower_ops(model, "trt")
    if report.kept:
        raise BuildError(f"graph {kind!r} has no TensorRT form: " + "; ".join(report.reasons))
    _attach_functions(model)
    model.graph.name = f"grok1_{kind}_{phase}"
    return model


def _fix_shapes(model: ir.Model, lengths: dict[str, int]) -> None:
    graph = model.graph
    values = [*graph.inputs, *(output for node in graph.all_nodes() for output in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        try:
            value.shape = ir.Shape([_length(axis, lengths) for axis in value.shape])
        except KeyError as letter:
            raise BuildError(
                f"{value.name} has shape {value.shape}; of {letter} no length is known"
            ) from letter


def _length(axis: int | ir.SymbolicDim, lengths: dict[str, int]) -> int:
    """Return the length of an axis: a number, or letters and numbers with `*` between."""
    if isinstance(axis, int):
        return axis
    factors = str(axis.value).split("*")
    return math.prod(int(part) if part.isdecimal() else lengths[part] for part in factors)


def _store(model: ir.Model, name: str, dtype: ir.DataType) -> None:
    """Have an input in the dtype that it is rounded to anyway: half the bytes of every step.

    The head of int8 has no such input.
    """
    for table in [value for value in model.graph.inputs if value.name == name]:
        table.dtype = dtype
        for node in table.consumers():
            if node.op_type == "Gather":
                node.outputs[0].dtype = dtype


def _multiply_as_stored(model: ir.Model, dtype: ir.DataType) -> None:
    """Multiply by T what was widened for a product that is rounded to T: TensorRT sums in float32.

    A template widens to float32 to say so; as nodes of their own the casts would write a table of
    twice its size in every step.
    """
    if dtype == ir.DataType.FLOAT:
        return
    for node in list(model.graph):
        if node.op_type not in ("Gemm", "MatMul") or node.domain:
            continue
        narrow = [_widened(value, dtype) for value in node.inputs]
        users = [user for user in node.outputs[0].consumers() if user.op_type == "Cast"]
        rounded = [user for user in users if user.outputs[0].dtype == dtype]
        if None in narrow or len(users) != 1 or users != rounded:
            continue
        for index, value in enumerate(narrow):
            node.replace_input_with(index, value)
        node.outputs[0].dtype = dtype
        rounded[0].outputs[0].replace_all_uses_with(node.outputs[0])
        model.graph.remove(rounded[0], safe=True)
    onnxscript.optimizer.optimize_ir(model, inline=False)


def _widened(value: ir.Value | None, dtype: ir.DataType) -> ir.Value | None:
    """Return what a value was cast from, if that is of the dtype."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "Cast":
        return None
    source = producer.inputs[0]
    return source if source is not None and source.dtype == dtype else None


def _attach_functions(model: ir.Model) -> None:
    for op in op_names():
        for body in part(op, "trt_function").FUNCTIONS if lowering(op, "trt") else ():
            function = ir.serde.deserialize_function(body.to_function_proto())
            model.functions[function.identifier()] = function
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # not typed there
