"""Stamp a template into one graph per layer: initialisers point at the bytes of the weights."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from export_grok.config import Dtype, GrokConfig
from export_grok.errors import BuildError, BundleError, ExportGrokError
from export_grok.export.contract import GraphKind, check_contract, ports, weight_prefix
from export_grok.files import atomic_file
from export_grok.weights import Weight, WeightIndex

__all__ = ["check_stamped", "content_of", "graph_errors", "read_graph", "stamped", "write_graph"]

_IR_DTYPES = {
    "int8": ir.DataType.INT8,
    "bfloat16": ir.DataType.BFLOAT16,
    "float16": ir.DataType.FLOAT16,
    "float32": ir.DataType.FLOAT,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
    "float8_e5m2": ir.DataType.FLOAT8E5M2,
}


def stamped(
    template: ir.Model,
    kind: GraphKind,
    config: GrokConfig,
    dtype: Dtype,
    index: WeightIndex,
    *,
    layer: int | None = None,
    tensor_parallel: int = 1,
) -> ir.Model:
    """Return a copy of the template whose weights are those of the index, by place, not by value.

    Args:
        template: as `trace.template_from_config` makes it.
        kind: of the template.
        config: of the model.
        dtype: of the graph.
        index: where the weights lie; the graph names files relative to its root.
        layer: number of the layer, for kind "layer".
        tensor_parallel: ranks that share the template, and the index is that of one of them.

    Raises:
        BuildError: a weight of the graph is not in the index, or differs in shape or dtype.
    """
    model = template.clone()
    graph = model.graph
    prefix = weight_prefix(kind, layer)
    contract = {row.name for row in ports(kind, config, dtype, tensor_parallel)}
    faults = []
    for value in [value for value in graph.inputs if value.name not in contract]:
        name = f"{prefix}{value.name}"
        weight = index.weights.get(name)
        shape = None if value.shape is None else tuple(value.shape.numpy())
        if weight is None:
            faults.append(f"{name} is not in the weight index")
            continue
        if (shape, value.dtype) != (weight.shape, _IR_DTYPES[weight.dtype]):
            faults.append(
                f"{name} is {weight.dtype}{list(weight.shape)}, "
                f"the graph takes {value.dtype}{list(shape or ())}"
            )
            continue
        graph.inputs.remove(value)
        value.const_value = _external(weight, str(value.name), index.root)
        graph.register_initializer(value)
    if faults:
        raise BuildError(f"graph {kind!r} cannot be stamped: " + "; ".join(faults))
    graph.name = f"grok1_{kind}" if layer is None else f"grok1_{kind}_{layer}"
    check_contract(model, kind, config, dtype, weights=False, tensor_parallel=tensor_parallel)
    return model


def content_of(model: ir.Model) -> bytes:
    """Return what the file of a graph holds: the same bytes for the same graph."""
    content: bytes = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    return content


def read_graph(path: Path) -> ir.Model:
    """Return the graph in a file, without the weights it points at.

    Raises:
        BundleError: it is no graph.
    """
    with graph_errors(path):
        return ir.load(path)


def check_stamped(
    model: ir.Model, path: Path, kind: GraphKind, index: WeightIndex, layer: int | None = None
) -> None:
    """Hold the weights that a stamped graph points at to the index that it was stamped with.

    Args:
        model: the graph, as it was read.
        path: of its file.
        kind: of it.
        index: where the weights lie.
        layer: its number, for kind "layer".

    Raises:
        BundleError: one lies elsewhere, or has another shape or dtype; all such are named.
    """
    faults = []
    for name, value in model.graph.initializers.items():
        found = value.const_value
        if not isinstance(found, ir.ExternalTensor):
            continue
        weight = index.weights.get(f"{weight_prefix(kind, layer)}{name}")
        place = (str(found.location), found.offset, found.length)
        form = (found.dtype, tuple(found.shape.numpy()))
        if weight is None or (place, form) != (
            (weight.file, weight.offset, weight.nbytes),
            (_IR_DTYPES[weight.dtype], weight.shape),
        ):
            faults.append(name)
    if faults:
        raise BundleError(
            f"{path} points at other weights than the index names ({', '.join(faults)}); export "
            "it again"
        )


@contextlib.contextmanager
def graph_errors(path: Path) -> Iterator[None]:
    """Take whatever goes wrong with a graph that was read from a file as damage of the file.

    Raises:
        BundleError: something went wrong.
    """
    try:
        yield
    except ExportGrokError:
        raise
    except Exception as error:  # whatever its bytes lead protobuf and the passes to
        said = str(error).partition("\n")[0][:200]
        raise BundleError(
            f"{path} cannot be read as an ONNX graph, or is none of this program's "
            f"({type(error).__name__}: {said}); export it again"
        ) from error


def write_graph(model: ir.Model, path: Path) -> None:
    """Write the graph, without the weights it points at, whole or not at all.

    Raises:
        OutputError: `path` cannot be written.
    """
    with atomic_file(path) as file:
        file.write(content_of(model))


def _external(weight: Weight, name: str, root: Path) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        weight.file,
        weight.offset,
        weight.nbytes,
        _IR_DTYPES[weight.dtype],
        shape=ir.Shape(weight.shape),
        name=name,
        base_dir=root,
    )
