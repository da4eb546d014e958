"""A fake GPU that runs kernels in Triton's interpreter, on the memory that they are given.

It shows that what is launched with which arguments comes back as a right or a wrong result. Of a
GPU, and of any time, it proves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.plugins.plugin_node import Shape
from export_grok.plugins.ptx.compiled_kernel import CompiledKernel
from scripts.gpu.cases import Case
from scripts.gpu.launch import Argument, Compiled, dtypes_of
from scripts.gpu.reader import READ
from tests.engines.trt.fake_device import FakeDevice, array, tensor
from tests.plugins.interpreted import interpreted

__all__ = ["FakeGpu", "uncompiled"]

MILLISECONDS = 20.0


@dataclass(kw_only=True)
class FakeGpu(FakeDevice):
    """A fake of `scripts.gpu.device.KernelDevice`.

    Attributes:
        change: makes what kernels write of what is right.
        misread: makes what kernels see of their inputs.
        launches: addresses that kernels were launched with, in order.
    """

    l2_bytes: int = 1 << 20
    multiprocessors: int = 2
    change: Callable[[list[NDArray[Any]]], list[NDArray[Any]]] = lambda outputs: outputs
    misread: Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]] = lambda inputs: inputs
    launches: list[tuple[int, ...]] = field(default_factory=list)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Write one byte everywhere."""
        self.at(address, nbytes)[:] = byte

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device."""

        def work() -> None:
            self.at(target, nbytes)[:] = self.at(source, nbytes)

        self.submit(work)

    def launch(self, compiled: Compiled, arguments: tuple[Argument, ...]) -> None:
        """Run a kernel, now or at the launch of the graph that is captured."""
        self.submit(lambda: self._run(compiled, arguments))

    def milliseconds(self, work: Callable[[], None]) -> float:
        """Do the work."""
        work()
        return MILLISECONDS

    def release(self) -> None:
        """Forget all memory."""
        self.buffers.clear()

    def _run(self, compiled: Compiled, arguments: tuple[Argument, ...]) -> None:
        node, call = compiled.node, compiled.call
        scalars = len(compiled.launch.scalars)
        first, last = arguments[: len(node.inputs)], arguments[len(node.inputs) + scalars :]
        self.launches.append(tuple(int(address) for address in (*first, *last)))
        passed = [int(value) for value in arguments[len(node.inputs) :][:scalars]]
        assert passed == list(compiled.launch.scalars.values())
        kinds, out_kinds = dtypes_of(compiled)
        inputs = {
            name: self._array(address, call.shapes[name], dtype)
            for (name, dtype), address in zip(kinds.items(), first, strict=True)
        }
        if node is READ:
            found = [self._read(inputs["source"], compiled)]
        else:
            seen = self.misread(inputs)
            tensors = {name: tensor(values) for name, values in seen.items()}
            attributes: dict[str, Any] = dict(call.attributes)
            made = interpreted(node, tensors, dtype=call.dtype, **attributes)
            found = [array(value) for value in made]
        targets = [
            self._array(address, shape, dtype)
            for address, shape, dtype in zip(
                last, node.output_shapes(call), out_kinds, strict=True
            )
        ]
        for target, values in zip(targets, self.change(found), strict=True):
            target[...] = values

    def _array(self, address: Argument, shape: Shape, dtype: str) -> NDArray[Any]:
        kind = ELEMENTS[dtype]
        nbytes = int(np.prod(shape)) * kind.itemsize
        return self.at(int(address), nbytes).view(kind).reshape(shape)

    def _read(self, source: NDArray[Any], compiled: Compiled) -> NDArray[Any]:
        """Do what the reader's PTX says."""
        ((threads, words),) = compiled.node.output_shapes(compiled.call)
        vectors = source.view(np.uint32).reshape(-1, threads, words)
        mixed: NDArray[Any] = np.bitwise_xor.reduce(vectors, 0).view(np.float32)
        return mixed


def uncompiled(case: Case) -> Compiled:
    """Return a case as it would be compiled; there is no PTX."""
    launch = case.node.launch(case.call)
    kernel = CompiledKernel(
        name=case.node.kernel,
        ptx="",
        target="sm_90a",
        parameters=len(case.node.inputs) + len(launch.scalars) + len(case.node.outputs),
        scalars=tuple(launch.scalars),
        num_warps=launch.num_warps,
        shared_bytes=0,
        static_shared_bytes=0,
        registers=0,
        spills=0,
        stack=0,
        hash="",
    )
    return Compiled(node=case.node, call=case.call, launch=launch, kernel=kernel)
