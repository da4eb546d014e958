"""What TensorRT 11 asks of a lowered graph, checked on a CPU and before any build.

A build by TensorRT-RTX does not prove it: that takes graphs which TensorRT's header rules out.
"Header" below is NvInfer.h of 11.1; what is said of RTX was tried with 1.7.1.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Final

import onnx
import onnx_ir as ir

from export_grok.engines.trt.misuse import attribute, misuse
from export_grok.errors import BuildError
from export_grok.plugins.op import DOMAIN
from export_grok.plugins.registry import plugin_nodes

__all__ = ["FURTHER", "RULES", "check_contract", "faults", "static_shapes"]

STANDARD: Final = ("", "ai.onnx")
COLLECTIVE: Final = ("trt", "DistCollective")  # wanted: the parser knows it by its type
# What the parser knows besides the ops of ONNX and whatever begins with TRT_. Source:
# OnnxParser.supports_operator of RTX, asked for all words in its library and for all operators of
# ONNX Runtime 1.32.
FURTHER: Final = frozenset(
    {
        *("DistCollective", "FallbackPluginImporter", "GroupQueryAttention", "ImageScaler"),
        *("LocalFunctionImporter", "MatMulNBits", "MultiHeadAttention", "ParametricSoftplus"),
        *("QMoE", "ScaledTanh", "SimplifiedLayerNormalization"),
        "SkipSimplifiedLayerNormalization",
    }
)
BRANCHES: Final = ("If", "Loop", "Scan")
LARGEST_CONSTANT: Final = 64 << 10  # bytes: room for shapes, axes and a table of frequencies


def check_contract(model: ir.Model) -> None:
    """Hold a lowered graph to all rules.

    Raises:
        BuildError: it breaks some; all are named.
    """
    if found := faults(model):
        title = f"graph {model.graph.name!r} is not one that TensorRT builds:"
        raise BuildError("\n  ".join([title, *found]))


def faults(model: ir.Model) -> list[str]:
    """Return all that breaks a rule, one line each."""
    return [fault for rule in RULES for fault in rule(model)]


def static_shapes(model: ir.Model) -> Iterator[str]:
    """Every input and output has a fixed shape.

    Source: NVIDIA/TensorRT#4849, each new shape leaks a CUDA module of an ahead-of-time plugin.
    And a captured CUDA graph is of one shape.
    """
    for direction, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            if value.shape is None or not all(type(axis) is int and axis for axis in value.shape):
                yield f"{direction} {value.name} has shape {value.shape}; it must be fixed"


def _no_branches(model: ir.Model) -> Iterator[str]:
    """No If, Loop or Scan. Source: TensorRT's conditionals cannot be captured as a CUDA graph."""
    for node, place in _nodes(model):
        if node.op_type in BRANCHES:
            yield f"{place} branches, and cannot be captured as a CUDA graph"


def _constants_are_small(model: ir.Model) -> Iterator[str]:
    """Weights are network inputs, so that one plan serves every layer and every rank."""
    tensors = {
        f"initialiser {name}": v.const_value for name, v in model.graph.initializers.items()
    }
    for node, place in _nodes(model):
        if node.op_type == "Constant":
            tensors[place] = ir.convenience.get_const_tensor(node.outputs[0])
    for name, tensor in tensors.items():
        if isinstance(tensor, ir.ExternalTensor):
            yield f"{name} lies in a file of its own; weights must be inputs"
        elif tensor is not None and tensor.nbytes > LARGEST_CONSTANT:
            yield f"{name} has {tensor.nbytes} bytes; weights must be inputs"


def _dequantises_constants(model: ir.Model) -> Iterator[str]:
    """DequantizeLinear takes a constant.

    Source: header, "Per-channel dequantization is supported only for input rooted at an
    IConstantLayer". RTX takes any.
    """
    for node, place in _nodes(model):
        if node.op_type == "DequantizeLinear" and _constant(node.inputs[0]) is None:
            yield f"{place} dequantises what is no constant; use Cast and Mul"


def _no_blocked_int8(model: ir.Model) -> Iterator[str]:
    """No DequantizeLinear of int8 in blocks. Source: header, blocks are for FP4, FP8 and INT4."""
    narrow = (ir.DataType.INT4, ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN)
    for node, place in _nodes(model):
        if node.op_type == "DequantizeLinear" and attribute(node, "block_size", 0):
            tensor = _constant(node.inputs[0])
            if tensor is None or tensor.dtype not in narrow:
                yield f"{place} dequantises in blocks, which int8 has no kernels for"


def _int8_constants_are_dequantised(model: ir.Model) -> Iterator[str]:
    """A constant of int8 goes to DequantizeLinear or a plugin alone, so to no Cast.

    Source: RTX, "Quantized constant (w) is only allowed before DQ or PLUGIN_V2 or kPLUGIN_V3
    node".
    """
    for node, place in _nodes(model):
        if node.op_type == "DequantizeLinear" or "plugin_namespace" in node.attributes:
            continue
        for value in node.inputs:
            tensor = _constant(value)
            if value is not None and tensor is not None and tensor.dtype == ir.DataType.INT8:
                yield f"{place} takes {value.name}, a constant of int8; make it an input"


def _no_native_names(model: ir.Model) -> Iterator[str]:
    """No node or function of another domain has the type of an op that the parser knows.

    Source: RTX. The parser looks at the type alone and takes its own op, not the function: a
    `grok1::Gelu` became the standard Gelu. A `plugin_namespace` would come first, but only where
    the plugin is registered.
    """
    named = [(node.domain, node.op_type, place) for node, place in _nodes(model)]
    named += [(domain, name, f"function {name}") for domain, name, _ in model.functions]
    for domain, name, place in named:
        if domain in STANDARD or (domain, name) == COLLECTIVE:
            continue
        if name in _native_names() or name.startswith("TRT_"):
            yield f"{place} is {domain}::{name}, and TensorRT takes its own {name} for it"


def _caches_are_bound(model: ir.Model) -> Iterator[str]:
    """The cache of a TensorScatter is an input with no other reader; what it becomes, an output.

    Source: RTX, "The output tensor must be a network output" and "Only linear mode is supported".
    Both are bound to one address: another reader of the input could see it before or after.
    """
    for node, place in _nodes(model):
        if node.op_type != "TensorScatter":
            continue
        cache, written = node.inputs[0], node.outputs[0]
        if node.graph is not model.graph:
            yield f"{place}: it must stand in the graph itself, where its cache is an input"
            continue
        if attribute(node, "mode", "linear") != "linear":
            yield f"{place} has mode {attribute(node, 'mode')}; it must be linear"
        if not written.is_graph_output():
            yield f"{place}: {written.name} is no output of the graph; it must be one"
        if cache is None or not cache.is_graph_input():
            yield f"{place}: its cache is no input of the graph; it must be one"
        elif len(cache.uses()) > 1 or cache.is_graph_output():
            yield f"{place}: {cache.name} is read elsewhere too; read {written.name} there"


def _attention_is_plain(model: ir.Model) -> Iterator[str]:
    """Attention has no soft cap and one output.

    Source: RTX, "Setting softcap is not supported in TensorRT Attention" and "TensorRT only
    supports Attention nodes with one output".
    """
    for node, place in _nodes(model):
        if node.op_type == "Attention" and node.domain in STANDARD:
            if attribute(node, "softcap", 0.0):
                yield f"{place} has a softcap; use GrokSoftcapAttention"
            if any(value.name for value in node.outputs[1:]):
                yield f"{place} has {len(node.outputs)} outputs; TensorRT's has one"


def _plugins_are_known(model: ir.Model) -> Iterator[str]:
    """A node of our domain is one launch of one known kernel, or a function of the graph.

    Source: tensorrt.plugin of 11.4, where an ahead-of-time plugin is one kernel and gets every
    attribute it declares; a plugin is looked up by type, `plugin_namespace` and `plugin_version`.
    """
    known = plugin_nodes()
    for node, place in _nodes(model):
        if node.op_type in known and node.domain == DOMAIN:
            yield from (f"{place}: {fault}" for fault in misuse(node, known[node.op_type]))
        elif "plugin_namespace" in node.attributes:
            yield f"{place} names a plugin; there is none but {', '.join(sorted(known))}"
        elif node.domain == DOMAIN and node.op_identifier() not in model.functions:
            yield f"{place} is neither a plugin nor a function of the graph"


RULES: Final[tuple[Callable[[ir.Model], Iterator[str]], ...]] = (
    static_shapes,
    _no_branches,
    _constants_are_small,
    _dequantises_constants,
    _no_blocked_int8,
    _int8_constants_are_dequantised,
    _no_native_names,
    _caches_are_bound,
    _attention_is_plain,
    _plugins_are_known,
)


def _nodes(model: ir.Model) -> Iterator[tuple[ir.Node, str]]:
    """Yield every node of the graph and of its functions, and how to name it to the user."""
    for node in model.graph.all_nodes():
        yield node, f"{node.op_type} -> {node.outputs[0].name}"
    for (_, name, _), function in model.functions.items():
        for node in function.all_nodes():
            yield node, f"{node.op_type} -> {node.outputs[0].name} in function {name}"


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    return None if value is None else ir.convenience.get_const_tensor(value)


@cache
def _native_names() -> frozenset[str]:
    schemas = onnx.defs.get_all_schemas_with_history()
    return FURTHER | {schema.name for schema in schemas if schema.domain in STANDARD}
