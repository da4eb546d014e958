"""What building plans needs, and what running them does.

Bytes of a rank are those of `memory`. What TensorRT-RTX takes was measured (docs/tensorrt.md, by
`benchmarks/plans.py`); of TensorRT, and of a GPU's speed, all figures are assumed.
"""

import dataclasses
import math
from typing import Final

from export_grok.artifacts import Bundle
from export_grok.config import EngineOptions
from export_grok.engines.demand import Demand, Graphs
from export_grok.engines.gpus import gpus_here
from export_grok.engines.trt.memory import memory_of
from export_grok.engines.trt.module import flavour_of
from export_grok.engines.trt.record import PHASES, Sizes, record_in
from export_grok.engines.trt.weights import STAGING
from export_grok.export.contract import GRAPH_KINDS
from export_grok.export.needs import TRACE_MAPPED, TRACE_SECONDS
from export_grok.export.parameters import layer_parameters
from export_grok.export.time_model import Workload, rank_bytes, rank_step
from export_grok.needs import Disk, Needs

__all__ = ["build_needs", "interpreter_needs", "probe_needs", "session_needs"]

MB: Final = 10**6

# Of TensorRT-RTX: the plans of 8 graphs for an architecture, 1.3 s and 8 MB; peak 0.74 GB.
RTX_SECONDS: Final = 0.2
RTX_MEMORY: Final = 750 * MB
PLAN_FILE: Final = 1 * MB
# Of TensorRT, which times kernels on the GPU.
TENSORRT_SECONDS: Final = 30.0
TENSORRT_MEMORY: Final = 4_000 * MB
# Of a process that has a GPU; and of bytes a second, from files and in the GPU's memory.
PROGRAM: Final = 500 * MB
FILE_RATE: Final = 3_000 * MB
GPU_RATE: Final = 1_000_000 * MB
# Interpreted, a layer is held as it is and as float32 of what its function bodies widen at once:
# 2.3 times the float32 of all was the peak of `verify --interpret`.
INTERPRETED_COPIES: Final = 2.3
INTERPRETER: Final = 150 * MB


def build_needs(graphs: Graphs, options: EngineOptions, backend: str = "trt") -> Needs:
    """Return what the plans of a folder of graphs take; nothing if they are there."""
    from export_grok.engines.trt.build import is_current

    flavour = flavour_of(backend)
    if graphs.manifest is not None and is_current(graphs.manifest, options, flavour):
        return Needs()
    config = graphs.config
    sizes = Sizes.of(options, config)
    plans = len(GRAPH_KINDS) * len(PHASES) * len(options.sm or flavour.architectures())
    disk = (Disk(folder=graphs.folder, nbytes=plans * PLAN_FILE),)
    if flavour.any_gpu:
        return Needs(
            disk=disk,
            memory=RTX_MEMORY,
            mapped=TRACE_MAPPED,
            seconds=TRACE_SECONDS + plans * RTX_SECONDS,
        )
    # While it times kernels, TensorRT holds all that one graph reads and writes.
    rank = dataclasses.replace(config, num_layers=1).for_rank(sizes.tensor_parallel)
    return Needs(
        disk=disk,
        memory=TENSORRT_MEMORY,
        gpu_memory=memory_of(rank, sizes, graphs.dtype, graphs.head).total,
        gpus=1,
        gpu_memory_free=_free(1),
        seconds=TRACE_SECONDS + plans * TENSORRT_SECONDS,
    )


def session_needs(bundle: Bundle, demand: Demand) -> Needs:
    """Return what a session takes with what it is asked, all ranks together.

    Raises:
        BundleError: the manifest does not say what the plans are.
    """
    manifest, sizes = bundle.manifest, record_in(bundle.manifest).sizes
    rank = bundle.config.for_rank(sizes.tensor_parallel)
    memory = memory_of(rank, sizes, manifest.dtype, manifest.head)
    workload = Workload(batch=demand.batch, context=demand.max_length)
    step = rank_step(rank, manifest.dtype, manifest.head, workload)
    steps = demand.decode + demand.batch * math.ceil(demand.prefill / sizes.chunk)
    return Needs(
        memory=sizes.tensor_parallel * (PROGRAM + STAGING),
        gpu_memory=memory.total,
        gpus=sizes.tensor_parallel,
        gpu_memory_free=_free(sizes.tensor_parallel),
        seconds=memory.weights * sizes.tensor_parallel / FILE_RATE + steps * step.read / GPU_RATE,
    )


def probe_needs(bundle: Bundle) -> Needs:
    """Return the memory that one graph takes at a time, as `probe` loads it.

    Raises:
        BundleError: the manifest does not say what the plans are.
    """
    manifest, sizes = bundle.manifest, record_in(bundle.manifest).sizes
    rank = dataclasses.replace(bundle.config, num_layers=1).for_rank(sizes.tensor_parallel)
    return Needs(
        memory=PROGRAM + STAGING,
        gpu_memory=memory_of(rank, sizes, manifest.dtype, manifest.head).total,
        gpus=1,
        gpu_memory_free=_free(1),
    )


def interpreter_needs(bundle: Bundle, layers: int) -> Needs:
    """Return the memory of so many interpreted layers at once, and the time of lowering."""
    rank = bundle.config.for_rank(1)
    nbytes = layers * rank_bytes(layer_parameters(bundle.config, 0).values(), rank, "float32")
    return Needs(
        memory=INTERPRETER + round(INTERPRETED_COPIES * 4 * nbytes),
        mapped=TRACE_MAPPED + nbytes,
        seconds=TRACE_SECONDS,
    )


def _free(gpus: int) -> int | None:
    """Return the free memory of the fullest of the first GPUs; None if it is not known."""
    free = [device.free for device in gpus_here().devices[:gpus]]
    known = [nbytes for nbytes in free if nbytes is not None]
    return min(known) if len(known) == gpus else None
