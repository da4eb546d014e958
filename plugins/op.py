"""What an op is, as plain data: any layer may ask without importing anything heavy."""

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["DOMAIN", "VERSION", "OpSpec", "Operand"]

# One ONNX domain for all ops. TensorRT takes it for the plugin namespace: no '.' is allowed.
DOMAIN = "grok1"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One input or output of an op.

    Attributes:
        name: of the argument, the same in torch, ONNX and C++.
        shape: axis letters of the legend in `export.model`.
        dtype: "T" is the dtype of the graph; "scale" is float32, float16 or bfloat16 whatever the
            graph's dtype is; else a dtype.
    """

    name: str
    shape: str
    dtype: Literal["T", "scale", "int8", "int64", "float32"] = "T"


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The signature of an op.

    Attributes:
        name: of its folder, and of the torch op in library `grok1`.
        op_type: of the ONNX node. It must be no standard op's type: TensorRT's parser looks at the
            type alone and would take the standard op.
        attributes: name -> int or float. Floats are rounded to float32 in the graph.
        aliases: output -> input that shares its memory when the backend writes in place.
    """

    name: str
    op_type: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: dict[str, type[int] | type[float]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
