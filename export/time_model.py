"""What a step of decoding reads, holds and adds up on one rank, and how long that takes on paper.

    time of a step = bytes read / (bandwidth * share)
                   + sums * (latency + bytes of a sum * 2 (N - 1) / N / rate of the link)

The bytes and the number of sums are counted, from the shapes of the stored tensors and from where
they are cut. The times are a model: nothing computes, launches or waits in it but for memory and
sums, and `share` and `latency` are assumed until they are measured.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from export_grok.config import Dtype, GrokConfig, HeadDtype, RankConfig
from export_grok.errors import ConfigError
from export_grok.export.data_sheets import DataSheet, Link
from export_grok.export.parameters import (
    Parameter,
    head_parameters,
    layer_parameters,
    model_parameters,
)
from export_grok.export.partition import cut_axis, share
from export_grok.weights import NUMPY_DTYPES

__all__ = [
    "BANDWIDTH_SHARE",
    "Estimate",
    "RankStep",
    "Workload",
    "estimate",
    "expected_experts",
    "rank_bytes",
    "rank_step",
    "sums_of_step",
]

# Assumed of GPUs: step b of `scripts.first_gpu_hour` measures it. The kernels for CPUs reach 0.8
# to 0.95 (docs/performance.md).
BANDWIDTH_SHARE: Final = 0.8
TABLE: Final = "embedding.weight"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is decoded.

    Attributes:
        batch: rows, B.
        context: tokens of each row that are attended to, the new one included.

    Raises:
        ConfigError: one of them is not 1 or more.
    """

    batch: int = 1
    context: int = 1024

    def __post_init__(self) -> None:
        for name in ("batch", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """Bytes of one rank in a step, which gives each row of the batch one token.

    Attributes:
        held: weights in its memory, the table of the vocabulary once.
        cache_held: keys and values of the context of all rows.
        dense: read of attention matrices, routers and norms.
        experts: read of the experts that some row has chosen, on average.
        head: read of its matrix, scales and norm.
        embedding: read of the table, a row for each row of the batch.
        cache: read of keys and values.
        sums: all-reduces.
        sum_bytes: length of what each adds up.
    """

    held: int
    cache_held: int
    dense: float
    experts: float
    head: float
    embedding: float
    cache: float
    sums: int
    sum_bytes: int

    @property
    def read(self) -> float:
        """All that is read."""
        return self.dense + self.experts + self.head + self.embedding + self.cache


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a step takes on paper.

    Attributes:
        step: what it was made from.
        batch: rows.
        fits: whether weights and cache are less than the GPU's memory.
        read_seconds: to read from memory.
        sum_seconds: of all all-reduces.
    """

    step: RankStep
    batch: int
    fits: bool
    read_seconds: float
    sum_seconds: float

    @property
    def seconds(self) -> float:
        """Return the time of a step."""
        return self.read_seconds + self.sum_seconds

    @property
    def row_tokens_per_second(self) -> float:
        """Return the speed of each row."""
        return 1 / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of all rows together."""
        return self.batch / self.seconds


def expected_experts(config: GrokConfig, batch: int) -> float:
    """Return how many different experts `batch` tokens choose in a layer, on average.

    E * (1 - (1 - C/E)^B): each token chooses C of E, all choices being equally likely. One token
    chooses exactly C; for more it is an expectation, and a router that prefers some experts
    chooses fewer different ones.
    """
    experts, chosen = config.num_experts, config.num_selected_experts
    return experts * (1 - (1 - chosen / experts) ** batch)


def sums_of_step(rank: RankConfig) -> int:
    """Return the all-reduces of a step: two in a layer, and one behind the embedding."""
    return 2 * rank.model.num_layers + 1 if rank.tensor_parallel > 1 else 0


def rank_bytes(parameters: Iterable[Parameter], rank: RankConfig, table: Dtype) -> int:
    """Return the bytes of one rank's parts of tensors.

    Args:
        parameters: of one layer, or of none.
        rank: any one.
        table: dtype that the table of the vocabulary has in memory.
    """
    total = 0
    for parameter in parameters:
        axis = cut_axis(parameter.name, parameter.shape, rank)
        shape = share(parameter.shape, axis, rank.tensor_parallel)
        dtype = table if parameter.name == TABLE else parameter.dtype
        total += math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
    return total


def rank_step(rank: RankConfig, dtype: Dtype, head: HeadDtype, workload: Workload) -> RankStep:
    """Return what one rank does in a step.

    Args:
        rank: any one: their shares are even.
        dtype: of activations, cache, and the table of the vocabulary in memory.
        head: matrix of the head.
        workload: what is decoded.
    """
    config, batch = rank.model, workload.batch
    layer = layer_parameters(config, 0).values()
    experts = [parameter for parameter in layer if ".experts." in parameter.name]
    dense = [parameter for parameter in layer if parameter not in experts]
    single = [p for p in model_parameters(config).values() if not p.name.startswith("layers.")]
    int8_head = list(head_parameters(config).values()) if head == "int8" else []
    expert_bytes = config.num_layers * rank_bytes(experts, rank, dtype)
    dense_bytes = config.num_layers * rank_bytes(dense, rank, dtype)
    once = single + [parameter for parameter in int8_head if parameter not in single]
    element = NUMPY_DTYPES[dtype].itemsize
    cache = 2 * config.num_layers * rank.kv_size * element * batch * workload.context
    return RankStep(
        held=dense_bytes + expert_bytes + rank_bytes(once, rank, dtype),
        cache_held=cache,
        dense=dense_bytes,
        experts=expert_bytes * expected_experts(config, batch) / config.num_experts,
        head=rank_bytes(int8_head or single, rank, dtype),
        embedding=batch * config.emb_size * element,
        cache=cache,
        sums=sums_of_step(rank),
        sum_bytes=batch * config.emb_size * element,
    )


def estimate(
    rank: RankConfig,
    dtype: Dtype,
    head: HeadDtype,
    workload: Workload,
    gpu: DataSheet,
    *,
    bandwidth_share: float = BANDWIDTH_SHARE,
    latency: float | None = None,
) -> Estimate:
    """Return how long a step takes on paper.

    Args:
        rank: any one.
        dtype: of activations, cache, and the table of the vocabulary in memory.
        head: matrix of the head.
        workload: what is decoded.
        gpu: that each rank has.
        bandwidth_share: of the data sheet's bandwidth that reading reaches.
        latency: seconds of an all-reduce of nothing; the link's by default.
    """
    step = rank_step(rank, dtype, head, workload)
    link = gpu.link
    each = _sum_seconds(step.sum_bytes, rank.tensor_parallel, link, latency)
    return Estimate(
        step=step,
        batch=workload.batch,
        fits=step.held + step.cache_held < gpu.memory,
        read_seconds=step.read / (gpu.bandwidth * bandwidth_share),
        sum_seconds=step.sums * each,
    )


def _sum_seconds(length: int, ranks: int, link: Link, latency: float | None) -> float:
    """Return the time of one all-reduce: each rank sends and receives 2 (N - 1) / N of it."""
    start = link.latency if latency is None else latency
    return start + length * 2 * (ranks - 1) / ranks / link.rate
