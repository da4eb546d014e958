"""Register every plugin node with TensorRT, its kernel compiled ahead of time.

While TensorRT builds it asks which outputs a node has, and which kernel computes them. Both are
answered of the node's plain data; a finished plan holds the kernels and no Python.

Needs `tensorrt` with its libraries and, to run what it built, a GPU: neither was there when this
was written. What is said of `tensorrt.plugin` was read in the Python sources of version 11.4.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import GenericAlias, ModuleType
from typing import Any, Final, Protocol

from export_grok.config import DTYPES, Dtype
from export_grok.errors import BuildError
from export_grok.optional import require
from export_grok.plugins.op import DOMAIN
from export_grok.plugins.plugin_node import Attributes, Call, Launch, PluginNode, Shape
from export_grok.plugins.ptx.compiler import compiled
from export_grok.plugins.registry import plugin_nodes

__all__ = [
    "TensorDesc",
    "call_of",
    "launch_numbers",
    "output_dtypes",
    "register_plugins",
    "scalar_numbers",
    "shapes_of",
    "signature_of",
]

# Names of `tensorrt.DataType`.
DATA_TYPES: Final[Mapping[str, str]] = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int8": "INT8",
    "int64": "INT64",
}
# Numbers of `onnx.TensorProto.DataType`: values of attribute `to`.
ONNX_DTYPES: Final[Mapping[int, Dtype]] = {1: "float32", 10: "float16", 16: "bfloat16"}


class Size(Protocol):
    """What is used of `tensorrt.plugin.ShapeExpr`.

    Attributes:
        is_fake: only the rank of the tensor is known yet; nothing else may be asked.
        is_constant: there is a `constant_value`.
    """

    is_fake: bool
    is_constant: bool

    def constant_value(self) -> int: ...


class TensorDesc(Protocol):
    """What is used of `tensorrt.plugin.TensorDesc`.

    Attributes:
        dtype: a `tensorrt.DataType`.
        has_shape: there is a `shape`: TensorRT asks for a kernel.
        shape: sizes, -1 for one that is not fixed.
        shape_expr: sizes, while TensorRT asks for outputs.
    """

    dtype: Any
    has_shape: bool
    shape: Iterable[int]
    shape_expr: Iterable[Size]


def register_plugins(sm: int, module: ModuleType | None = None) -> None:
    """Make TensorRT's parser know all plugin nodes, with kernels for GPUs of architecture `sm`.

    Called again it changes the architecture, for networks parsed from then on.

    Args:
        sm: compute capability without its point, e.g. 90.
        module: `tensorrt`; imported if it is not given.

    Raises:
        MissingDependencyError: TensorRT is not installed, or cannot have plugins in Python.
    """
    trt = module or require("tensorrt", extra="gpu")
    qdp = require(f"{trt.__name__}.plugin", extra="gpu")
    for node in plugin_nodes().values():
        plugin = f"{DOMAIN}::{node.op_type}"
        # A name that is taken is refused (`_lib.register`); an implementation is replaced.
        if not hasattr(getattr(qdp.op, DOMAIN, None), node.op_type):
            qdp.register(plugin)(_description(node, trt, qdp))
        # No `autotune`: TensorRT then takes the network's dtypes for the inputs, the description's
        # for the outputs, all of them row-major, and one tactic
        # (`_plugin_class.get_supported_format_combinations`).
        qdp.aot_impl(plugin)(_implementation(node, sm, qdp))


def _description(node: PluginNode, trt: ModuleType, qdp: ModuleType) -> Callable[..., Any]:
    """Return the function that tells TensorRT the outputs of a node."""

    def describe(*inputs: Any, **attributes: int | float) -> tuple[Any, ...]:
        call = call_of(node, inputs, attributes)
        if call.shapes:
            shapes = [tuple(shape) for shape in node.output_shapes(call)]
        else:  # of this answer TensorRT takes the dtypes alone (`get_output_data_types`)
            shapes = [tuple(qdp.ShapeExpr() for _ in row.shape.split()) for row in node.outputs]
        return tuple(
            qdp.from_shape_expr(shape, getattr(trt.DataType, DATA_TYPES[dtype]))
            for shape, dtype in zip(shapes, output_dtypes(node, call), strict=True)
        )

    tensor = qdp.TensorDesc
    describe.__signature__ = signature_of(  # type: ignore[attr-defined]
        node, tensor, returns=[tensor] * len(node.outputs)
    )
    return describe


def _implementation(node: PluginNode, sm: int, qdp: ModuleType) -> Callable[..., Any]:
    """Return the function that gives TensorRT the kernel of a node and its launch."""

    def implement(*arguments: Any) -> tuple[str, str, Any, Any]:
        inputs = arguments[: len(node.inputs)]
        *values, _outputs, _tactic = arguments[len(node.inputs) :]
        call = call_of(node, inputs, dict(zip(node.attributes, values, strict=True)))
        launch, kernel = node.launch(call), compiled(node, call, sm)
        numbers = launch_numbers(launch, kernel.num_warps, kernel.shared_bytes)
        # SymInt32 by name: a plain int would become a SymIntExpr, which TensorRT refuses.
        scalars = [qdp.SymInt32(value) for value in scalar_numbers(node, launch)]
        return (
            kernel.name,
            kernel.ptx,
            qdp.KernelLaunchParams(**numbers),
            qdp.SymIntExprs.from_tuple(scalars),
        )

    tensor = qdp.TensorDesc
    implement.__signature__ = signature_of(  # type: ignore[attr-defined]
        node,
        tensor,
        behind={"outputs": _tuple_of([tensor] * len(node.outputs)), "tactic": int},
        returns=[str, str, qdp.KernelLaunchParams, qdp.SymIntExprs],
    )
    return implement


def signature_of(
    node: PluginNode,
    tensor: type,
    *,
    behind: Mapping[str, Any] | None = None,
    returns: Sequence[type],
) -> inspect.Signature:
    """Return the signature that TensorRT reads the inputs and attributes of a node from.

    An implementation names all attributes: TensorRT would let it name fewer (`_validate_aot_impl`)
    and pass them all the same (`get_launch_params`).

    Args:
        node: whose.
        tensor: annotation of an input.
        behind: further arguments, name -> annotation.
        returns: annotations of what is returned.
    """
    arguments = [(row.name, tensor) for row in node.inputs]
    arguments += [*node.attributes.items(), *(behind or {}).items()]
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in arguments
        ],
        return_annotation=_tuple_of(returns),
    )


def call_of(node: PluginNode, inputs: Sequence[TensorDesc], attributes: Attributes) -> Call:
    """Return what a node is called with; no shapes while TensorRT knows ranks alone.

    Raises:
        BuildError: a dtype is none that the node takes, a size is not fixed, or attributes are
            others than the node's or in another order.
    """
    # TensorRT passes attributes as they came from the parser: to the description by name, to the
    # implementation by position. The parser takes them from the ONNX node in the order in which
    # the plugin declares them and leaves out what is absent (seen with the parser of TensorRT-RTX
    # 1.7); the plugin declares them in the order of the signature
    # (`_parse_register_inputs`, `_TemplatePluginCreator`). Should that ever not hold, one would be
    # taken for another: the description, which is asked first, refuses it.
    if list(attributes) != list(node.attributes):
        raise BuildError(
            f"{node.op_type} got the attributes {_listed(attributes)}; it must get "
            f"{_listed(node.attributes)}, in this order. Build the graph again."
        )
    dtypes = {row.name: _dtype_of(x) for row, x in zip(node.inputs, inputs, strict=True)}
    for row in node.inputs:
        if row.dtype in DATA_TYPES and dtypes[row.name] != row.dtype:
            raise BuildError(
                f"{node.op_type}: input {row.name} is {dtypes[row.name]}; it must be {row.dtype}"
            )
    return Call(
        shapes=shapes_of(node, inputs),
        attributes=dict(attributes),
        dtype=_common(node, "T", dtypes) or _target(node, attributes),
        scales=_common(node, "scale", dtypes) or "bfloat16",
    )


def shapes_of(node: PluginNode, inputs: Sequence[TensorDesc]) -> dict[str, Shape]:
    """Return the shapes of the inputs by name; nothing while TensorRT knows ranks alone.

    Raises:
        BuildError: a size is not fixed.
    """
    shapes = {}
    for row, tensor in zip(node.inputs, inputs, strict=True):
        if tensor.has_shape:
            shape = tuple(tensor.shape)
        elif any(size.is_fake for size in tensor.shape_expr):
            return {}
        else:
            shape = tuple(s.constant_value() if s.is_constant else -1 for s in tensor.shape_expr)
        if -1 in shape:
            raise BuildError(
                f"{node.op_type}: axis {shape.index(-1)} of input {row.name} has no fixed size. "
                "Plugin nodes are for networks whose sizes are all fixed: give the graph's inputs "
                "numbers for shapes."
            )
        shapes[row.name] = shape
    return shapes


def output_dtypes(node: PluginNode, call: Call) -> tuple[str, ...]:
    """Return the dtypes of the outputs of a call."""
    letters = {"T": call.dtype, "scale": call.scales}
    return tuple(letters.get(row.dtype, row.dtype) for row in node.outputs)


def launch_numbers(launch: Launch, num_warps: int, shared_bytes: int) -> dict[str, int]:
    """Return the arguments of `tensorrt.plugin.KernelLaunchParams`."""
    grid = dict(zip(("grid_x", "grid_y", "grid_z"), launch.grid, strict=True))
    return {**grid, "block_x": 32 * num_warps, "shared_mem": shared_bytes}


def scalar_numbers(node: PluginNode, launch: Launch) -> tuple[int, ...]:
    """Return the numbers that a kernel gets between its inputs and its outputs.

    Raises:
        BuildError: one does not fit in int32; TensorRT would cut it.
    """
    for name, value in launch.scalars.items():
        if not -(2**31) <= value < 2**31:
            raise BuildError(
                f"{node.op_type}: {name} is {value}; a kernel takes int32. "
                "Take a smaller batch, chunk or length."
            )
    return tuple(launch.scalars.values())


def _dtype_of(tensor: TensorDesc) -> str:
    """Return our name of a dtype, or TensorRT's if we have none."""
    name: str = tensor.dtype.name
    return next((ours for ours, theirs in DATA_TYPES.items() if theirs == name), name)


def _common(node: PluginNode, letter: str, dtypes: Mapping[str, str]) -> Dtype | None:
    """Return the dtype that all inputs of one letter share; None if there are none."""
    found = {row.name: dtypes[row.name] for row in node.inputs if row.dtype == letter}
    shared = [dtype for dtype in DTYPES if set(found.values()) == {dtype}]
    if found and not shared:
        raise BuildError(
            f"{node.op_type}: the dtypes of {_listed(found)} are {_listed(found.values())}; they "
            f"must be one of {_listed(DTYPES)}, the same for all"
        )
    return shared[0] if shared else None


def _target(node: PluginNode, attributes: Attributes) -> Dtype:
    number = int(attributes.get("to", 0))
    if number not in ONNX_DTYPES:
        numbers = _listed(f"{number} for {dtype}" for number, dtype in ONNX_DTYPES.items())
        raise BuildError(f"{node.op_type}: attribute to is {number}; it must be {numbers}")
    return ONNX_DTYPES[number]


def _tuple_of(kinds: Iterable[type]) -> GenericAlias:
    return GenericAlias(tuple, tuple(kinds))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
