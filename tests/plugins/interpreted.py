"""Runs a plugin node's kernel in Triton's interpreter, on a CPU, and watches what it accesses.

It reads inputs, and writes each element of the outputs once; nothing else may happen, and on a GPU
programs that write the same element would race.

The interpreter must be asked for before `triton` is imported: `tests/conftest.py` does. It holds
bfloat16 as whole numbers: it rounds what becomes one towards zero, takes an int8 that becomes one
for its bits, and multiplies matrices of them as whole numbers. A GPU does none of that, and here
the interpreter does not either.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from export_grok.plugins.plugin_node import Call, PluginNode
from export_grok.plugins.registry import part

__all__ = ["call_of", "interpreted"]

POISON = float("nan")


def call_of(node: PluginNode, inputs: Mapping[str, Tensor], dtype: str, **attributes: Any) -> Call:
    """Return the call that these inputs make."""
    scales = [inputs[row.name] for row in node.inputs if row.dtype == "scale"]
    return Call(
        shapes={row.name: tuple(inputs[row.name].shape) for row in node.inputs},
        attributes=attributes,
        dtype=dtype,  # type: ignore[arg-type]  # a parameter of tests
        scales=str(scales[0].dtype).removeprefix("torch.") if scales else "bfloat16",  # type: ignore[arg-type]
    )


def interpreted(
    node: PluginNode,
    inputs: Mapping[str, Tensor],
    *,
    dtype: str,
    constants: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> list[Tensor]:
    """Return the outputs of one launch; they were NaN before.

    Args:
        node: whose kernel.
        inputs: by name.
        dtype: of the graph, T.
        constants: constexpr arguments to take instead of the launch's.
        attributes: of the node.
    """
    call = call_of(node, inputs, dtype, **attributes)
    launch = node.launch(call)
    kinds = {"T": getattr(torch, dtype), "float32": torch.float32}
    outputs = [
        torch.full(shape, POISON, dtype=kinds[row.dtype])
        for row, shape in zip(node.outputs, node.output_shapes(call), strict=True)
    ]
    kernel = getattr(part(node.op, "triton_kernel"), node.kernel)
    with _watched(list(inputs.values()), outputs), _as_on_a_gpu(), _made_ready_once():
        kernel[launch.grid](
            *(inputs[row.name] for row in node.inputs),
            *launch.scalars.values(),
            *outputs,
            **{**launch.constants, **(constants or {})},
        )
    return outputs


@contextmanager
def _watched(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[None]:
    """See that the kernel reads `inputs` only, and writes each element of `outputs` once."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    times = [np.zeros(output.numel(), np.int64) for output in outputs]

    def inside(tensor: Tensor, addresses: Any) -> Any:
        place = addresses.astype(np.int64) - tensor.data_ptr()
        return (place >= 0) & (place < tensor.nbytes)

    def read(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses = pointers.data[mask.data]
        known = [inside(tensor, addresses) for tensor in inputs]
        assert np.logical_or.reduce(known).all(), "the kernel reads beyond its inputs"
        return load(builder, pointers, mask, *rest)

    def write(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses = pointers.data[mask.data]
        known = [inside(tensor, addresses) for tensor in outputs]
        assert np.logical_or.reduce(known).all(), "the kernel writes beyond its outputs"
        for tensor, count, here in zip(outputs, times, known, strict=True):
            place = addresses[here].astype(np.int64) - tensor.data_ptr()
            np.add.at(count, place // tensor.itemsize, 1)
        return store(builder, pointers, value, mask, *rest)

    with mock.patch.multiple(
        InterpreterBuilder, create_masked_load=read, create_masked_store=write
    ):
        yield
    for count in times:
        assert (count == 1).all(), f"elements were written {set(count.tolist())} times"


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Have the interpreter do with bfloat16 what a GPU does."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def nearest(builder: Any, source: Any, target: Any) -> Any:
        if target.scalar != tl.bfloat16 or source.dtype.scalar == tl.bfloat16:
            return cast(builder, source, target)
        rounded = source.data.astype(np.float32).astype(ml_dtypes.bfloat16)
        return TensorHandle(rounded.view(np.uint16), tl.bfloat16)

    def product(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        factors = [
            cast(builder, factor, tl.float32) if factor.dtype.scalar == tl.bfloat16 else factor
            for factor in (a, b)
        ]
        return dot(builder, *factors, *rest)

    with mock.patch.multiple(InterpreterBuilder, cast_impl=nearest, create_dot=product):
        yield


@contextmanager
def _made_ready_once() -> Iterator[None]:
    """Have the interpreter change `triton.language` once in a launch for each module of functions.

    It does so for every call of a function by a kernel, which takes a third of all time.
    """
    from triton.runtime import interpreter

    change = interpreter._patch_lang
    changed: dict[str, Any] = {}

    def change_once(function: Any) -> Any:
        if function.__module__ not in changed:
            changed[function.__module__] = change(function)
        return changed[function.__module__]

    with mock.patch.object(interpreter, "_patch_lang", change_once):
        yield
