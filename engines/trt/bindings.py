"""Every input and output of a lowered graph, as the record names it: ports, then weights."""

import math
from collections.abc import Collection

import onnx_ir as ir

from export_grok.config import Dtype, GrokConfig
from export_grok.engines.trt.record import Binding
from export_grok.errors import BuildError
from export_grok.export.contract import GraphKind, ports, weight_prefix
from export_grok.export.parameters import Parameter, head_parameters, model_parameters
from export_grok.export.partition import cut_axis, share

__all__ = ["bindings_of"]


def bindings_of(
    graph: ir.Graph,
    kind: GraphKind,
    config: GrokConfig,
    dtype: Dtype,
    tensor_parallel: int,
    crossing: Collection[str] = (),
) -> tuple[Binding, ...]:
    """Return all inputs, then all outputs, in the graph's order.

    Args:
        graph: lowered, with fixed shapes.
        kind: of the graph.
        config: of the model.
        dtype: of the graph.
        tensor_parallel: ranks that share it.
        crossing: what else may go in and out, if the graph is a part of one.

    Raises:
        BuildError: an input is neither in the I/O contract nor a weight, or a weight has not the
            shape of a rank's part.
    """
    rank = config.for_rank(tensor_parallel)
    aliases = {row.name: row.aliases for row in ports(kind, config, dtype, tensor_parallel)}
    prefix = weight_prefix(kind, 0)
    parameters = head_parameters(config) | model_parameters(config)

    def weight(value: ir.Value) -> Binding:
        name = f"{prefix}{value.name}"
        parameter: Parameter | None = parameters.get(name)
        if parameter is None:
            raise BuildError(f"input {value.name} of graph {kind!r} is neither port nor weight")
        cut = cut_axis(name, parameter.shape, rank)
        wanted = share(parameter.shape, cut, tensor_parallel)
        if _shape(value) != wanted:
            raise BuildError(f"{name} has shape {_shape(value)}; a rank's part has {wanted}")
        return Binding(
            name=str(value.name),
            direction="in",
            shape=wanted,
            dtype=_dtype(value),
            weight=str(value.name),
            cut=cut,
        )

    inputs = [
        weight(value)
        if value.name not in aliases and value.name not in crossing
        else Binding(
            name=str(value.name), direction="in", shape=_shape(value), dtype=_dtype(value)
        )
        for value in graph.inputs
    ]
    outputs = [
        Binding(
            name=str(value.name),
            direction="out",
            shape=_shape(value),
            dtype=_dtype(value),
            aliases=None if value.name in crossing else aliases[str(value.name)],
        )
        for value in graph.outputs
    ]
    return (*inputs, *outputs)


def _shape(value: ir.Value) -> tuple[int, ...]:
    shape = tuple(axis for axis in value.shape or () if isinstance(axis, int))
    if value.shape is None or len(shape) != len(value.shape) or math.prod(shape) == 0:
        raise BuildError(f"{value.name} has shape {value.shape}; numbers are needed")
    return shape


def _dtype(value: ir.Value) -> str:
    name = str(value.dtype).lower()
    return {"float": "float32"}.get(name, name)
