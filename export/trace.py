"""Trace one module of the model into an ONNX template: grok1 nodes, weights as inputs, no data.

A template knows shapes only, so a full-size layer is traced in seconds in a few hundred MB.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from export_grok.config import Dtype, GrokConfig, HeadDtype
from export_grok.export.contract import GraphKind, Port, check_contract, ports
from export_grok.export.model import DecoderLayer, Embedding, Head
from export_grok.plugins.onnx_schema import attach_functions, translation_table

__all__ = ["OPSET", "template_from_config"]

OPSET = 24
IR_VERSION = 11

# torch.export takes an axis of length 0 or 1 for a constant: examples of 2 and more keep it open.
_EXAMPLE_LENGTHS = {"B": 2, "S": 3, "T": 5}


def template_from_config(
    kind: GraphKind,
    config: GrokConfig,
    dtype: Dtype,
    head: HeadDtype = "float32",
    tensor_parallel: int = 1,
) -> ir.Model:
    """Return the graph of one kind with all weights as inputs, batch, tokens and cache dynamic.

    The op nodes keep their function bodies beside them, so the template means the same anywhere.

    Args:
        kind: of the graph.
        config: of the model.
        dtype: of activations and cache.
        head: matrix of the head, for its kinds.
        tensor_parallel: ranks that share the graph; it is that of any one of them.

    Raises:
        BuildError: the result breaks the I/O contract.
    """
    rows = ports(kind, config, dtype, tensor_parallel)
    inputs = [row for row in rows if row.direction == "in"]
    with _quiet_exporter(), FakeTensorMode(allow_non_fake_inputs=True):
        module = _module(kind, config, dtype, head, tensor_parallel).eval()
        example = tuple(_example(row) for row in inputs)
        dims = {letter: torch.export.Dim(letter) for letter in _EXAMPLE_LENGTHS}
        program = torch.export.export(
            module, example, dynamic_shapes=_dynamic(inputs, dims), strict=False
        )
        exported = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,
            opset_version=OPSET,
            custom_translation_table=translation_table(),
            dynamic_shapes=_dynamic(inputs, {letter: letter for letter in dims}),
            input_names=[row.name for row in inputs],
            output_names=[row.name for row in rows if row.direction == "out"],
            verbose=False,
        )
    if exported is None:  # only with f= given
        raise AssertionError("torch.onnx.export returned nothing")
    model: ir.Model = exported.model
    _weights_to_inputs(model, {name for name, _ in module.named_buffers()})
    onnxscript.optimizer.optimize_ir(model, inline=False)
    _clear_metadata(model)
    attach_functions(model)
    model.graph.name = f"grok1_{kind}"
    model.graph.doc_string = None
    model.ir_version = IR_VERSION
    check_contract(model, kind, config, dtype, weights=True, tensor_parallel=tensor_parallel)
    return model


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep to ourselves what the exporter says about axis names and packages it does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _module(
    kind: GraphKind, config: GrokConfig, dtype: Dtype, head: HeadDtype, tensor_parallel: int
) -> nn.Module:
    if kind == "layer":
        return DecoderLayer(config, tensor_parallel)
    embedding = Embedding(config, dtype, tensor_parallel)
    if kind == "embedding":
        return embedding
    return Head(config, dtype, None if head == "int8" else embedding, tensor_parallel)


def _example(row: Port) -> Tensor:
    shape = [_EXAMPLE_LENGTHS[axis] if isinstance(axis, str) else axis for axis in row.shape]
    return torch.zeros(shape, dtype=getattr(torch, row.dtype))


def _dynamic(inputs: list[Port], names: dict[str, Any]) -> tuple[dict[int, Any], ...]:
    return tuple(
        {axis: names[letter] for axis, letter in enumerate(row.shape) if isinstance(letter, str)}
        for row in inputs
    )


def _weights_to_inputs(model: ir.Model, weights: set[str]) -> None:
    # As inputs no pass can look at them, merge equal ones or fold them.
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if name in weights:
            del graph.initializers[name]
            value.const_value = None
            graph.inputs.append(value)


def _clear_metadata(model: ir.Model) -> None:
    # The exporter leaves source paths and stack traces of this machine.
    graph = model.graph
    model.metadata_props.clear()
    graph.metadata_props.clear()
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for output in node.outputs:
            output.metadata_props.clear()
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        value.metadata_props.clear()
