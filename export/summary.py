"""What a checkpoint, a folder of graphs or a bundle is: counts, bytes, what running it needs."""

import contextlib
import dataclasses
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from export_grok.artifacts import MANIFEST, open_bundle
from export_grok.config import (
    TENSOR_PARALLEL_SIZES,
    Dtype,
    GrokConfig,
    HeadDtype,
    RankConfig,
)
from export_grok.errors import ConfigError
from export_grok.export.checkpoint import open_weights
from export_grok.export.data_sheets import DATA_SHEETS
from export_grok.export.parameters import Parameter, head_parameters, model_parameters
from export_grok.export.partition import cut_axis
from export_grok.export.time_model import (
    BANDWIDTH_SHARE,
    Estimate,
    Workload,
    estimate,
    sums_of_step,
)
from export_grok.manifest import HeadError
from export_grok.weights import NUMPY_DTYPES, WeightIndex

__all__ = ["GpuEstimates", "RankNeeds", "Summary", "summary_of"]

CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# That the original computes in; a checkpoint alone does not say.
CHECKPOINT_DTYPE: Dtype = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """What one of `tensor_parallel` equal ranks holds and reads.

    Attributes:
        weight_bytes: int8 values, scales and the rest. Norms, router and the scales of a single
            group of rows are on every rank.
        cache_bytes_per_token: keys and values of one token in all layers.
        cache_bytes: of one row at the model's full length.
        read_bytes_per_token: weights read to decode one token of one row: the chosen experts, and
            the matrix that the head has.
        all_reduces_per_token: sums over the ranks, to decode one token.
        all_reduce_bytes_per_token: length of what they add up, all of them together.
    """

    tensor_parallel: int
    weight_bytes: int
    cache_bytes_per_token: int
    cache_bytes: int
    read_bytes_per_token: int
    all_reduces_per_token: int
    all_reduce_bytes_per_token: int

    def tokens_per_second(self, bandwidth: float) -> float:
        """Return the bound of decode speed for memory of `bandwidth` bytes per second a rank."""
        return bandwidth / self.read_bytes_per_token


@dataclass(frozen=True, kw_only=True)
class GpuEstimates:
    """The time model for one kind of GPU.

    Attributes:
        gpu: its short name.
        workload: what is decoded.
        bandwidth_share: of the data sheet's bandwidth.
        latency: of an all-reduce, in seconds.
        ranks: tensor-parallel size -> how long a step takes.
    """

    gpu: str
    workload: Workload
    bandwidth_share: float
    latency: float
    ranks: dict[int, Estimate]

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON values; the GPU's data sheet with it."""
        value = dataclasses.asdict(self) | {
            "data_sheet": dataclasses.asdict(DATA_SHEETS[self.gpu])
        }
        value["ranks"] = [
            {
                "tensor_parallel": size,
                **dataclasses.asdict(found),
                "seconds": found.seconds,
                "row_tokens_per_second": found.row_tokens_per_second,
                "tokens_per_second": found.tokens_per_second,
            }
            for size, found in self.ranks.items()
        ]
        return value


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What lies in a folder.

    Attributes:
        kind: "checkpoint", "graphs" or "engine".
        path: of the folder.
        config: of the model.
        dtype: of activations and cache; None for a checkpoint.
        backend: of the engine.
        head: matrix of the head; of a checkpoint the embedding's table.
        head_bytes: length of that matrix, scales included.
        head_error: what int8 did to it; None for the table.
        lowering: op type -> nodes that were lowered, and that run by function body.
        files: weight files.
        file_bytes: their length together.
        parameters: numbers the model is made of; scales are counted apart.
        scales: number of scales.
        bytes_by_dtype: of the stored tensors.
        ranks: needs for every tensor-parallel size that divides the model.
    """

    kind: str
    path: str
    config: GrokConfig
    dtype: Dtype | None
    backend: str | None
    head: HeadDtype
    head_bytes: int
    head_error: HeadError | None
    lowering: dict[str, dict[str, int]]
    files: int
    file_bytes: int
    parameters: int
    scales: int
    bytes_by_dtype: dict[str, int]
    ranks: tuple[RankNeeds, ...]

    def to_dict(self, *, bandwidth: float) -> dict[str, object]:
        """Return the summary as JSON values, with speed bounds for a bandwidth in bytes/s."""
        value = dataclasses.asdict(self)
        for rank, needs in zip(value["ranks"], self.ranks, strict=True):
            rank["tokens_per_second_bound"] = needs.tokens_per_second(bandwidth)
        return value | {"bandwidth": bandwidth}

    def estimates(
        self,
        gpu: str,
        workload: Workload,
        *,
        bandwidth_share: float = BANDWIDTH_SHARE,
        latency: float | None = None,
    ) -> GpuEstimates:
        """Return the time model of a GPU, for the sizes of `ranks`.

        Args:
            gpu: one of `DATA_SHEETS`.
            workload: what is decoded.
            bandwidth_share: of the data sheet's bandwidth that reading reaches.
            latency: of an all-reduce, in seconds; the link's by default.
        """
        sheet = DATA_SHEETS[gpu]
        found = {
            needs.tensor_parallel: estimate(
                self.config.for_rank(needs.tensor_parallel),
                self.dtype or CHECKPOINT_DTYPE,
                self.head,
                workload,
                sheet,
                bandwidth_share=bandwidth_share,
                latency=latency,
            )
            for needs in self.ranks
        }
        return GpuEstimates(
            gpu=gpu,
            workload=workload,
            bandwidth_share=bandwidth_share,
            latency=sheet.link.latency if latency is None else latency,
            ranks=found,
        )


def summary_of(
    path: Path, *, config: GrokConfig | None = None, tensor_parallel: int | None = None
) -> Summary:
    """Return what the folder `path` holds. Weights are checked, not read.

    Args:
        path: of a checkpoint, of graphs, or of a bundle.
        config: of a checkpoint that has no `config.json` and is not Grok-1.
        tensor_parallel: the only size to tell the needs for; all that divide the model by default.

    Raises:
        BundleError: it is a damaged bundle.
        CheckpointError: it is no bundle, and no whole checkpoint.
        ConfigError: the model cannot be cut into `tensor_parallel` equal parts.
    """
    if (path / MANIFEST).exists():
        bundle = open_bundle(path)
        manifest = bundle.manifest
        return _summary(
            path,
            manifest.config,
            bundle.index(),
            kind=manifest.kind,
            dtype=manifest.dtype,
            backend=manifest.backend,
            head=manifest.head,
            head_error=manifest.head_error,
            lowering=manifest.lowering,
            tensor_parallel=tensor_parallel,
        )
    found, index = open_weights(path, config)
    return _summary(
        path,
        found,
        index,
        kind="checkpoint",
        dtype=None,
        backend=None,
        head="float32",
        head_error=None,
        lowering={},
        tensor_parallel=tensor_parallel,
    )


def _summary(
    path: Path,
    config: GrokConfig,
    index: WeightIndex,
    *,
    kind: str,
    dtype: Dtype | None,
    backend: str | None,
    head: HeadDtype,
    head_error: HeadError | None,
    lowering: dict[str, dict[str, int]],
    tensor_parallel: int | None,
) -> Summary:
    by_dtype: Counter[str] = Counter()
    for weight in index:
        by_dtype[weight.dtype] += weight.nbytes
    scales = sum(weight.size for weight in index if weight.name.endswith(".scales"))
    return Summary(
        kind=kind,
        path=str(path),
        config=config,
        dtype=dtype,
        backend=backend,
        head=head,
        head_bytes=sum(_bytes(parameter) for parameter in _head(config, head)),
        head_error=head_error,
        lowering=lowering,
        files=len(index.files),
        file_bytes=sum(index.files.values()),
        parameters=sum(weight.size for weight in index) - scales,
        scales=scales,
        bytes_by_dtype=dict(by_dtype),
        ranks=_ranks(
            config, _sizes(config, tensor_parallel), CACHE_BYTES[dtype or CHECKPOINT_DTYPE], head
        ),
    )


def _sizes(config: GrokConfig, asked: int | None) -> list[int]:
    if asked is not None:
        return [config.for_rank(asked).tensor_parallel]
    sizes = []
    for size in TENSOR_PARALLEL_SIZES:
        with contextlib.suppress(ConfigError):
            sizes.append(config.for_rank(size).tensor_parallel)
    return sizes


def _ranks(
    config: GrokConfig, sizes: list[int], element: int, head: HeadDtype
) -> tuple[RankNeeds, ...]:
    parameters = model_parameters(config)
    parameters |= {parameter.name: parameter for parameter in _head(config, head)}
    ranks = []
    for size in sizes:
        rank = config.for_rank(size)
        held = read = 0.0
        for parameter in parameters.values():
            share = _bytes(parameter) / (1 if _replicated(parameter, rank) else size)
            held += share
            read += share * _read_share(parameter, config, head)
        sums = sums_of_step(rank)
        cache = 2 * config.num_layers * rank.num_kv_heads * config.key_size * element
        ranks.append(
            RankNeeds(
                tensor_parallel=size,
                weight_bytes=round(held),
                cache_bytes_per_token=cache,
                cache_bytes=cache * config.sequence_len,
                read_bytes_per_token=round(read),
                all_reduces_per_token=sums,
                all_reduce_bytes_per_token=sums * config.emb_size * element,
            )
        )
    return tuple(ranks)


def _head(config: GrokConfig, head: HeadDtype) -> list[Parameter]:
    """Return the matrix of the head, and its scales."""
    if head == "float32":
        return [model_parameters(config)["embedding.weight"]]
    return [p for p in head_parameters(config).values() if p.name.startswith("unembedding.")]


def _bytes(parameter: Parameter) -> int:
    size = NUMPY_DTYPES[parameter.dtype].itemsize
    for length in parameter.shape:
        size *= length
    return size


def _replicated(parameter: Parameter, rank: RankConfig) -> bool:
    name = re.sub(r"^layers\.\d+\.", "", parameter.name)
    return cut_axis(name, parameter.shape, rank) is None


def _read_share(parameter: Parameter, config: GrokConfig, head: HeadDtype) -> float:
    if parameter.name == "embedding.weight":
        return 1.0 if head == "float32" else 0.0  # as the embedding, one row: next to nothing
    if ".experts." in parameter.name:
        return config.num_selected_experts / config.num_experts
    return 1.0
