"""A plan of any graph on a device: memory for all that is bound to it, and its enqueues."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.device import Device
from export_grok.engines.trt.engine import Engine
from export_grok.engines.trt.module import Flavour, flavour_of
from export_grok.engines.trt.plan import plan_from_graph
from export_grok.engines.trt.tensors import ELEMENTS, size_of
from scripts.gpu.step import Options, Skipped

__all__ = ["PlanRun", "built_plan", "flavour_here"]

Array = NDArray[Any]

# In every float dtype NaN, in every integer one -1.
POISON = np.uint8(0xFF)


class PlanRun:
    """An execution context, and memory for each input and output.

    Attributes:
        tensors: inputs and outputs by name, as the plan tells them.
        addresses: theirs. What aliases an input has its address.
    """

    def __init__(self, device: Device, engine: Engine) -> None:
        """Allocate everything; outputs are poisoned."""
        self._device = device
        self._context = engine.context(device.allocate(max(1, engine.scratch)))
        self.tensors = {row.name: row for row in engine.tensors}
        self.addresses: dict[str, int] = {}
        for row in engine.tensors:
            if not row.aliases:
                self.addresses[row.name] = device.allocate(size_of(row))
            if row.direction == "out" and not row.aliases:
                device.upload(self.addresses[row.name], np.full(size_of(row), POISON))
        for row in engine.tensors:
            if row.aliases:
                self.addresses[row.name] = self.addresses[row.aliases]

    def write(self, inputs: Mapping[str, Array]) -> None:
        """Fill inputs."""
        for name, array in inputs.items():
            row = self.tensors[name]
            if (array.shape, array.dtype) != (row.shape, ELEMENTS[row.dtype]):
                raise AssertionError(f"{name} is {array.dtype} {array.shape}; the plan has {row}")
            self._device.upload(self.addresses[name], np.ascontiguousarray(array))

    def enqueue(self, others: Mapping[str, int] | None = None) -> None:
        """Enqueue the plan once; `others` are addresses to take instead of ours."""
        for name, address in {**self.addresses, **(others or {})}.items():
            self._context.bind(name, address)
        self._context.enqueue(self._device.stream)

    def read(self, name: str, address: int | None = None) -> Array:
        """Return what an input or output holds, or what such a one at another address does."""
        row = self.tensors[name]
        array = np.empty(row.shape, ELEMENTS[row.dtype])
        self._device.download(self.addresses[name] if address is None else address, array)
        return array


def flavour_here(options: Options) -> Flavour:
    """Return the package that the plans are built by.

    Raises:
        Skipped: it is not installed, or what graphs are made with is not.
    """
    flavour = flavour_of(options.backend)
    wanted = {flavour.package: flavour.extra, "torch": "export", "onnxruntime": "gpu"}
    for package, extra in wanted.items():
        if importlib.util.find_spec(package) is None:
            raise Skipped(
                f'{package} is not installed: pip install "export-grok[{extra}]"'
                + ("; --backend trt-rtx takes TensorRT-RTX" if package == "tensorrt" else "")
            )
    return flavour


def built_plan(flavour: Flavour, graph: Path, sm: int) -> Path:
    """Return the plan of a graph, beside it; built if it is not there.

    Raises:
        BuildError: it cannot be built.
    """
    plan = graph.with_suffix(f".{flavour.package}.plan")
    if not plan.exists():
        if not flavour.any_gpu:
            from export_grok.plugins.tensorrt_plugins import register_plugins

            register_plugins(sm)
        plan_from_graph(graph, plan, flavour=flavour, sm=sm)
    return plan
