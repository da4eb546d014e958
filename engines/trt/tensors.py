"""Inputs and outputs of graphs, looked up and measured."""

import math
from typing import Any

import numpy as np

from export_grok.engines.trt.record import Binding, GraphRecord
from export_grok.weights import NUMPY_DTYPES

__all__ = ["CACHES", "ELEMENTS", "PARTIAL", "SUM", "binding_of", "size_of", "state_of"]

ELEMENTS: dict[str, np.dtype[Any]] = {str(name): dtype for name, dtype in NUMPY_DTYPES.items()}
ELEMENTS["int64"] = np.dtype(np.int64)

# Inputs of a layer that last from run to run.
CACHES = ("k_cache", "v_cache")

# Of parts: what is to be summed over ranks, and the sum. `engines.cut` calls them so.
PARTIAL, SUM = "partial", "sum"


def binding_of(graph: GraphRecord, name: str) -> Binding:
    """Return the input or output `name` of a graph that has it."""
    (found,) = (binding for binding in graph.bindings if binding.name == name)
    return found


def size_of(binding: Binding) -> int:
    """Return the length in bytes of what is bound."""
    return math.prod(binding.shape) * ELEMENTS[binding.dtype].itemsize


def state_of(graph: GraphRecord) -> tuple[Binding, ...]:
    """Return the inputs and outputs that belong to a run: neither weights nor caches."""
    return tuple(
        binding
        for binding in graph.bindings
        if binding.weight is None and (binding.aliases or binding.name) not in CACHES
    )
