"""A kernel with its arguments, and memory around them that shows what must not be touched."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.plugins.plugin_node import Call, Launch, PluginNode, Shape
from export_grok.plugins.ptx.compiled_kernel import CompiledKernel

if TYPE_CHECKING:
    from scripts.gpu.device import KernelDevice

__all__ = ["Argument", "Compiled", "Output", "arguments", "dtypes_of", "place", "placed_output"]

# In the order of the kernel: an address, as Python's int, is passed in 64 bits.
Argument = int | np.int32

# Every byte of it: NaN in each float dtype, and -1 in each integer one.
POISON = 0xFF
# In bytes, before and behind each tensor. TensorRT aligns tensors likewise.
GUARD = 256


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A plugin node's kernel for one call."""

    node: PluginNode
    call: Call
    launch: Launch
    kernel: CompiledKernel


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a kernel writes."""

    address: int
    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        """Length without the guards."""
        return math.prod(self.shape) * ELEMENTS[self.dtype].itemsize

    def poison(self, device: "KernelDevice") -> None:
        """Fill it and what lies around it."""
        device.fill(self.address - GUARD, self.nbytes + 2 * GUARD, POISON)

    def fetch(self, device: "KernelDevice") -> tuple[NDArray[Any], bool]:
        """Return what was written, and whether what lies around it was left alone."""
        found = np.empty(self.nbytes + 2 * GUARD, np.uint8)
        device.download(self.address - GUARD, found)
        inside = found[GUARD:-GUARD].view(ELEMENTS[self.dtype]).reshape(self.shape)
        around = np.concatenate([found[:GUARD], found[-GUARD:]])
        return inside, bool((around == POISON).all())


def arguments(
    compiled: Compiled, inputs: Mapping[str, int], outputs: Sequence[int]
) -> tuple[Argument, ...]:
    """Return what TensorRT passes to a kernel: addresses of inputs, int32, addresses of outputs.

    Args:
        compiled: the kernel.
        inputs: addresses by name.
        outputs: addresses in the node's order.

    Raises:
        AssertionError: that is not what the kernel takes.
    """
    node, scalars = compiled.node, compiled.launch.scalars
    if tuple(scalars) != compiled.kernel.scalars:
        raise AssertionError(f"{tuple(scalars)} are passed, {compiled.kernel.scalars} are taken")
    passed: tuple[Argument, ...] = (
        *(inputs[row.name] for row in node.inputs),
        *(np.int32(value) for value in scalars.values()),
        *outputs,
    )
    if len(passed) != compiled.kernel.parameters or len(outputs) != len(node.outputs):
        raise AssertionError(
            f"{len(passed)} arguments are passed, {compiled.kernel.parameters} are taken"
        )
    return passed


def dtypes_of(compiled: Compiled) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the dtypes of the inputs by name, and of the outputs."""
    letters: dict[str, str] = {"T": compiled.call.dtype, "scale": compiled.call.scales}
    inputs, outputs = (
        {row.name: letters.get(row.dtype, row.dtype) for row in rows}
        for rows in (compiled.node.inputs, compiled.node.outputs)
    )
    return inputs, tuple(outputs.values())


def place(device: "KernelDevice", array: NDArray[Any]) -> int:
    """Copy an array to the device, between guards; return its address."""
    address = device.allocate(array.nbytes + 2 * GUARD)
    device.fill(address, GUARD, POISON)
    device.fill(address + GUARD + array.nbytes, GUARD, POISON)
    device.upload(address + GUARD, array)
    return address + GUARD


def placed_output(device: "KernelDevice", shape: Shape, dtype: str) -> Output:
    """Return poisoned memory for an output."""
    nbytes = math.prod(shape) * ELEMENTS[dtype].itemsize
    output = Output(
        address=device.allocate(nbytes + 2 * GUARD) + GUARD, shape=tuple(shape), dtype=dtype
    )
    output.poison(device)
    return output
