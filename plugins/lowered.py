"""What an op's lowering works with: constants, slices of stored weights, and the way to refuse."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

__all__ = [
    "NotLowered",
    "attribute",
    "constant",
    "dtype_of",
    "fixed_shape",
    "reshaped",
    "slice_weight",
    "stored_weight",
]


class NotLowered(Exception):  # noqa: N818 - no fault: the op's function body serves instead
    """This node cannot be lowered; the text says why, with the value that is in the way."""


def stored_weight(node: ir.Node, index: int) -> ir.ExternalTensor:
    """Return the weight that input `index` of the node names, as it lies in its file.

    Raises:
        NotLowered: the input is no stored weight: a template, or a computed value.
    """
    value = node.inputs[index]
    tensor = None if value is None else value.const_value
    if not isinstance(tensor, ir.ExternalTensor):
        name = None if value is None else value.name
        raise NotLowered(f"{name} is not a stored weight: stamp the template first")
    return tensor


def slice_weight(
    graph: ir.Graph,
    tensor: ir.ExternalTensor,
    *,
    index: Sequence[int] = (),
    rows: tuple[int, int] | None = None,
) -> ir.Value:
    """Return an initialiser for a part of a stored weight: the same bytes, copied nowhere.

    Args:
        graph: gets the initialiser.
        tensor: the whole.
        index: of the part, in the leading axes, e.g. the expert.
        rows: first and end row of the part within what `index` leaves; all by default.
    """
    lengths = [int(length) for length in tensor.shape.numpy()]
    itemsize = int(tensor.dtype.itemsize)  # onnx_ir counts sub-byte types in fractions
    offset = int(tensor.offset or 0)
    name = f"{tensor.name}{''.join(f'[{i}]' for i in index)}"
    for i in index:
        lengths = lengths[1:]
        offset += i * math.prod(lengths) * itemsize
    if rows is not None:
        first, end = rows
        name += f"[{first}:{end}]"
        offset += first * math.prod(lengths[1:]) * itemsize
        lengths[0] = end - first
    if name in graph.initializers:
        return graph.initializers[name]
    part = ir.ExternalTensor(
        tensor.location,
        offset,
        math.prod(lengths) * itemsize,
        tensor.dtype,
        shape=ir.Shape(lengths),
        name=name,
        base_dir=tensor.base_dir,
    )
    return _registered(graph, name, part)


def constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Return an initialiser with these numbers, one for all that ask by this name."""
    name = f"grok1.{name}"
    if name in graph.initializers:
        return graph.initializers[name]
    return _registered(graph, name, ir.tensor(array, name=name))


def attribute(node: ir.Node, name: str) -> Any:
    """Return the value of an attribute that the op's schema requires."""
    return node.attributes[name].value


def fixed_shape(value: ir.Value | None) -> tuple[int, ...]:
    """Return the shape of a value of a static graph.

    Raises:
        NotLowered: an axis has no fixed length.
    """
    shape = None if value is None else value.shape
    if shape is None or not all(isinstance(axis, int) for axis in shape):
        name = None if value is None else value.name
        raise NotLowered(f"{name} has shape {shape}; TensorRT's plugins take fixed shapes")
    return tuple(int(axis) for axis in shape)  # type: ignore[arg-type]  # all are


def dtype_of(value: ir.Value | None) -> ir.DataType:
    """Return the dtype of a value; every one of a template has one."""
    if value is None or value.dtype is None:
        raise AssertionError("every value of a template has a dtype")
    return value.dtype


def reshaped(
    graph: ir.Graph, tape: Tape, value: ir.Value | None, shape: Sequence[int]
) -> ir.Value:
    """Return a value in another, fixed shape; its dtype is known if that of `value` is."""
    name = f"shape_{'_'.join(map(str, shape))}"
    out = tape.op("Reshape", [value, constant(graph, name, np.array(shape, np.int64))])
    if value is not None and value.type is not None:
        out.shape, out.type = ir.Shape(shape), value.type
    return out


def _registered(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(
        name=name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value
