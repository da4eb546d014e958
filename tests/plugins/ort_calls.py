"""Run a call by the native kernels as the product does: in ONNX Runtime, bound by address."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from export_grok.plugins.kernels import native_kernels
from export_grok.plugins.op import DOMAIN, VERSION
from export_grok.plugins.registry import spec
from tests.plugins.formulas import Array, Call, y_shape

__all__ = ["Place", "run", "run_from_file", "session_for"]

# Copies an array into memory for an operand of this name.
Place = Callable[[str, Array], Array]
Types = tuple[tuple[str, int], ...]  # of the operands, by name

TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int64): TensorProto.INT64,
}
STORED = ("weight", "scales")


def at_odd_address(name: str, array: Array) -> Array:
    """Return a copy; a weight or its scales lie one byte behind an aligned address."""
    offset = int(name.endswith(STORED))
    memory = np.empty(array.nbytes + offset, np.uint8)[offset:]
    copy: Array = memory.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def types_of(call: Call) -> Types:
    return tuple((name, TYPES[array.dtype]) for name, array in call.inputs.items())


def graph_of(
    op: str, types: Types, attributes: dict[str, Any], weights: list[TensorProto] | None = None
) -> bytes:
    """Return a model of one node."""
    found = spec(op)
    weights = weights or []
    stored = {tensor.name for tensor in weights}
    outputs = [operand.name for operand in found.outputs]
    node = helper.make_node(
        found.op_type, [name for name, _ in types], outputs, domain=DOMAIN, **attributes
    )
    of_any_shape = functools.partial(helper.make_tensor_value_info, shape=None)
    graph = helper.make_graph(
        [node],
        op,
        [of_any_shape(name, kind) for name, kind in types if name not in stored],
        [of_any_shape(name, TensorProto.FLOAT) for name in outputs],
        weights,
    )
    imports = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, VERSION)]
    model: bytes = helper.make_model(
        graph, opset_imports=imports, ir_version=11
    ).SerializeToString()
    return model


def session_of(model: str | bytes, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # errors come as exceptions
    options.register_custom_ops_library(str(native_kernels().library))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def session_for(call: Call, threads: int = 1) -> ort.InferenceSession:
    """Return a session of one node for calls like this one, of any shape."""
    return _session(call.op, types_of(call), tuple(call.attributes.items()), threads)


@functools.cache
def _session(
    op: str, types: Types, attributes: tuple[tuple[str, Any], ...], threads: int
) -> ort.InferenceSession:
    return session_of(graph_of(op, types, dict(attributes)), threads)


def run(
    call: Call, *, threads: int = 1, place: Place = at_odd_address, in_place: bool = True
) -> list[Array]:
    """Return the outputs; one that aliases an input has its memory, or not."""
    memory = {name: place(name, array) for name, array in call.inputs.items()}
    return bound_run(session_for(call, threads), call, memory, place, in_place)


def bound_run(
    session: ort.InferenceSession,
    call: Call,
    memory: dict[str, Array],
    place: Place = at_odd_address,
    in_place: bool = True,
) -> list[Array]:
    binding = session.io_binding()
    for entry in session.get_inputs():
        array = memory[entry.name]
        kind = TYPES[array.dtype]
        binding.bind_input(entry.name, "cpu", 0, kind, array.shape, array.ctypes.data)
    results = {"y": place("y", np.full(y_shape(call), np.nan, np.float32))}
    for output, source in spec(call.op).aliases.items():
        array = memory[source]
        results[output] = array if in_place else place(output, np.full_like(array, 7))
    for name, array in results.items():
        binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return [results[operand.name] for operand in spec(call.op).outputs]


def run_from_file(call: Call, folder: Path) -> list[Array]:
    """Return the outputs of a graph whose weights lie in a file beside it, at odd offsets."""
    content, weights = bytearray(), []
    for name, kind in types_of(call):
        if name.endswith(STORED):
            array = call.inputs[name]
            content += bytes(1 + len(content) % 2)
            tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": "weights.bin", "offset": len(content), "length": array.nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            weights.append(tensor)
            content += array.tobytes()
    (folder / "weights.bin").write_bytes(content)
    model = folder / "graph.onnx"
    model.write_bytes(graph_of(call.op, types_of(call), call.attributes, weights))
    return bound_run(session_of(str(model), threads=1), call, call.inputs)
