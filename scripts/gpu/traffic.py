"""The fewest bytes that a kernel moves: what it needs of each input once, each output once."""

import math
from collections.abc import Mapping

import numpy as np

from export_grok.engines.trt.tensors import ELEMENTS
from scripts.gpu.inputs import Array
from scripts.gpu.launch import Compiled, dtypes_of

__all__ = ["traffic"]


def traffic(compiled: Compiled, values: Mapping[str, Array]) -> int:
    """Return bytes read and written.

    Of the experts' matrices the chosen ones count, each once, whoever chose it; of caches, the
    slots that a row sees. What is read again counts once: the second-level cache may hold it.

    Args:
        compiled: the kernel.
        values: its inputs `experts` and `start`, where it has them.
    """
    call, (inputs, outputs) = compiled.call, dtypes_of(compiled)
    total = 0.0
    for name, dtype in inputs.items():
        shape = call.shapes[name]
        nbytes = math.prod(shape) * ELEMENTS[dtype].itemsize
        total += nbytes * _share(name, shape, values)
    for shape, dtype in zip(compiled.node.output_shapes(call), outputs, strict=True):
        total += math.prod(shape) * ELEMENTS[dtype].itemsize
    return round(total)


def _share(name: str, shape: tuple[int, ...], values: Mapping[str, Array]) -> float:
    """Return what part of an input is read."""
    if name.endswith(("weight", "scales")) and len(shape) == 3:
        read = len(np.unique(values["experts"])) if "experts" in values else 1
        return read / shape[0]
    if name in ("k_cache", "v_cache"):
        batch, _, slots, _ = shape
        return float((values["start"] + 1).sum() / (batch * slots))
    return 1.0
