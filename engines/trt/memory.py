"""What a rank needs in GPU memory, and the most that GPUs of an architecture have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from export_grok.config import Dtype, HeadDtype, RankConfig
from export_grok.engines.trt.record import Sizes
from export_grok.errors import ConfigError
from export_grok.export.parameters import (
    head_parameters,
    layer_parameters,
    model_parameters,
)
from export_grok.export.time_model import rank_bytes
from export_grok.plugins.int8_linear.trt_lowering import FEW_ROWS
from export_grok.weights import NUMPY_DTYPES

__all__ = ["MOST_GB", "Memory", "check_memory", "memory_of"]

# The largest GPU of each compute capability, in GB. Sources: NVIDIA's data sheets of the A100,
# A40, RTX 6000 Ada, H200, B200, RTX PRO 6000 Blackwell and DGX Spark.
MOST_GB = {80: 80, 86: 48, 89: 48, 90: 141, 100: 192, 120: 96, 121: 128}
GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights: of all layers, the table of the vocabulary once.
        cache: keys and values of all rows.
        prefill: the largest that a chunk writes between two kernels: attention logits of all
            heads, before and behind the soft cap, or a matrix made of int8 for many rows.
    """

    weights: int
    cache: int
    prefill: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.prefill


def memory_of(rank: RankConfig, sizes: Sizes, dtype: Dtype, head: HeadDtype) -> Memory:
    """Return what a rank needs; TensorRT's own scratch memory is not known before it runs.

    Args:
        rank: any one.
        sizes: of the graphs.
        dtype: of the graphs, and of the table on the device.
        head: matrix of the head.
    """
    config = rank.model
    single = [
        parameter
        for name, parameter in model_parameters(config).items()
        if not name.startswith("layers.")
    ]
    if head == "int8":
        single += [row for name, row in head_parameters(config).items() if row not in single]
    layer = rank_bytes(layer_parameters(config, 0).values(), rank, dtype)
    weights = config.num_layers * layer + rank_bytes(single, rank, dtype)
    slots = config.num_layers * sizes.batch * rank.num_kv_heads * sizes.slots
    return Memory(
        weights=weights,
        cache=2 * slots * config.key_size * NUMPY_DTYPES[dtype].itemsize,
        prefill=max(_written(rank, sizes, dtype, head)),
    )


def _written(rank: RankConfig, sizes: Sizes, dtype: Dtype, head: HeadDtype) -> Iterator[int]:
    """Yield the bytes of what prefill writes between two kernels."""
    width, float32 = rank.model.emb_size, NUMPY_DTYPES["float32"].itemsize
    yield 2 * rank.num_q_heads * sizes.chunk * sizes.slots * float32  # around the soft cap
    if sizes.chunk > FEW_ROWS:
        yield width * rank.ffn_size * float32
        if head == "int8":
            yield width * rank.vocab_size * NUMPY_DTYPES[dtype].itemsize


def check_memory(
    rank: RankConfig, sizes: Sizes, need: Memory, sms: Sequence[int], gpu_memory: float | None
) -> None:
    """Refuse sizes that no GPU asked for can hold.

    Args:
        rank: any one.
        sizes: of the graphs.
        need: of the rank.
        sms: architectures asked for.
        gpu_memory: of one GPU in GB; None for the most there is of each architecture.

    Raises:
        ConfigError: it does not fit; says what needs how much.
    """
    room = {sm: gpu_memory or MOST_GB.get(sm, max(MOST_GB.values())) for sm in sms}
    small = {sm: have for sm, have in room.items() if need.total > have * GB}
    if not small:
        return
    names = ", ".join(f"SM{sm}: {have:g} GB" for sm, have in small.items())
    limit = "--gpu-memory says" if gpu_memory else "the largest GPUs have"
    ranks = f"one of {rank.tensor_parallel} ranks" if rank.tensor_parallel > 1 else "one GPU"
    raise ConfigError(
        f"{ranks} needs {need.total / GB:.1f} GB ({need.weights / GB:.1f} weights, "
        f"{need.cache / GB:.1f} cache of {sizes.batch} rows of {sizes.max_length} tokens, "
        f"{need.prefill / GB:.1f} for a chunk of {sizes.chunk}) and {limit} less ({names}); raise "
        "--tp, lower --batch, --max-length or --chunk, leave an --sm away, or say with "
        "--gpu-memory what there is"
    )
