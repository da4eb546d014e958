"""A polygraphy runner of one graph, by whatever runs graphs one at a time."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from export_grok.engines.probe import GraphName, Probe, Run
from export_grok.export.contract import ports

__all__ = ["ProbeRunner"]


class ProbeRunner(BaseRunner):  # type: ignore[misc]  # polygraphy has no types
    """Runs one graph of a probe; its outputs include the taps.

    Attributes:
        outputs: of the last run.
    """

    def __init__(self, name: str, graph: GraphName, open_probe: Callable[[], Probe]) -> None:
        """Take what is opened when the runner is activated.

        Args:
            name: of the runner, as polygraphy prints it.
            graph: to run.
            open_probe: returns what runs it.
        """
        super().__init__(name=name)
        self.outputs: dict[str, NDArray[Any]] = {}
        self._graph = graph
        self._open = open_probe
        self._stack = ExitStack()

    def activate_impl(self) -> None:
        """Load the graph."""
        probe = self._open()
        self._run: Run = self._stack.enter_context(probe.graph(self._graph))
        # Both sides take float32, and an engine of another dtype makes it of that.
        rows = ports(self._graph.kind, probe.config, "float32")
        self._ports = [row for row in rows if row.direction == "in"]

    def get_input_metadata_impl(self) -> TensorMetadata:
        """Return the inputs of the contract; what is dynamic is None."""
        metadata = TensorMetadata()
        for row in self._ports:
            shape = tuple(axis if isinstance(axis, int) else None for axis in row.shape)
            metadata.add(row.name, dtype=np.dtype(row.dtype), shape=shape)
        return metadata

    def infer_impl(self, feed_dict: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """Return outputs and taps by name."""
        begin = time.perf_counter()
        self.outputs = self._run({name: np.asarray(array) for name, array in feed_dict.items()})
        self.inference_time = time.perf_counter() - begin
        return self.outputs

    def deactivate_impl(self) -> None:
        """Let the graph go."""
        self._stack.close()
        del self._run, self._ports
        self.outputs = {}
