"""What a TensorRT plugin node is, as plain data: one node is one launch of one Triton kernel.

An op of the model may become several such nodes. A kernel gets pointers to its inputs, int32
numbers, and pointers to its outputs, in that order, and nothing else: that is all TensorRT's
ahead-of-time plugins pass. What it needs between two launches is an output of the first.

Everything here is functions of plain numbers, so that tests, the compiler of the kernels and the
adapter to TensorRT ask the same thing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from export_grok.config import Dtype
from export_grok.plugins.op import Operand

__all__ = ["Attributes", "Call", "Launch", "PluginNode", "Shape"]

Shape = tuple[int, ...]
Attributes = Mapping[str, int | float]
StoredScale = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A plugin node with everything known: what it is launched and compiled for.

    Attributes:
        shapes: of the inputs, by name.
        attributes: of the node.
        dtype: of the graph, T.
        scales: dtype of the scales.
    """

    shapes: Mapping[str, Shape]
    attributes: Attributes = field(default_factory=dict)
    dtype: Dtype
    scales: StoredScale = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a kernel is compiled and launched for one call.

    Attributes:
        grid: programs in x, y and z.
        scalars: the kernel's int32 arguments by name, between its inputs and its outputs.
        constants: its `tl.constexpr` arguments by name, behind its outputs.
        num_warps: 32 threads each.
        num_stages: of the software pipeline of loads.
    """

    grid: tuple[int, int, int]
    scalars: Mapping[str, int]
    constants: Mapping[str, int | float | bool | str]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, kw_only=True)
class PluginNode:
    """One kind of plugin node.

    Attributes:
        op: name of the op's folder; its `triton_kernel` holds the kernel.
        op_type: of the ONNX node, and the plugin's name.
        kernel: name of the Triton function.
        inputs: tensors, by the names of the kernel's arguments in lower case. Dtypes as in
            `plugins.op.Operand`.
        outputs: likewise.
        attributes: name -> int or float.
        output_shapes: shapes of the outputs of a call.
        launch: of a call.
    """

    op: str
    op_type: str
    kernel: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: Mapping[str, type[int] | type[float]] = field(default_factory=dict)
    output_shapes: Callable[[Call], tuple[Shape, ...]]
    launch: Callable[[Call], Launch]
