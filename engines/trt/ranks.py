"""One rank of a tensor-parallel TensorRT engine: its part of the weights on a GPU of its own."""

from export_grok.artifacts import Bundle
from export_grok.engines.group import Group
from export_grok.engines.trt.device import CudaDevice
from export_grok.engines.trt.engine import PlanRuntime
from export_grok.engines.trt.fit import flavour_of_record
from export_grok.engines.trt.record import record_in
from export_grok.engines.trt.session import TrtSession

__all__ = ["open_rank"]


def open_rank(
    bundle: Bundle, group: Group, *, batch: int, max_length: int, threads: int | None = None
) -> TrtSession:
    """Return the rank's session; every rank opens its own, in a process of its own.

    Args:
        bundle: with plans for so many ranks.
        group: the ranks; rank r takes GPU r.
        batch: rows of the cache.
        max_length: longest row, prompt and answer together, in tokens.
        threads: a GPU has no use for them.

    Raises:
        BundleError: the plans are incomplete, or not of these weights.
        CheckpointError: a weight file is missing or too short.
        ConfigError: the plans are not for so many ranks, for what is asked or for this GPU, there
            are too few GPUs, memory does not suffice, or NCCL does not connect the GPUs.
        MissingDependencyError: TensorRT, `cuda.core`, nccl4py, NCCL, the driver or a GPU is
            missing.
    """
    record = record_in(bundle.manifest)
    return TrtSession(
        bundle,
        record,
        batch=batch,
        max_length=max_length,
        device=CudaDevice(group.rank, group.ranks),
        runtime=PlanRuntime(flavour_of_record(record)),
        group=group,
        # NCCL may be captured, on all ranks alike. Of TensorRT's own collectives nothing says so.
        capture=False,
    )
