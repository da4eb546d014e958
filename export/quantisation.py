"""What int8 has done to the matrices of a checkpoint, tensor by tensor.

Without a reference: the range of the scales, and how many values stand at the end of their range.
With the float weights it was made from: the error, worst first.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.checkpoint import open_weights
from export_grok.export.safetensors_header import read_store_header
from export_grok.needs import Needs, OnNeeds
from export_grok.progress import progress_bar
from export_grok.weights import Weight, WeightIndex, WeightReader

__all__ = ["QuantisedTensor", "quantisation_of"]

# Values that are widened at once.
BLOCK = 1 << 22

# What the program takes with a block; and values a second that are counted, and that are held to
# floats: of a full-size layer, on 2 cores.
MEMORY = 100_000_000
COUNT_RATE = 700e6
COMPARE_RATE = 100e6


@dataclass(frozen=True, kw_only=True)
class QuantisedTensor:
    """One int8 matrix, or those of all experts.

    Attributes:
        name: without `.weight`.
        values: how many.
        scale_min: smallest scale.
        scale_max: largest scale.
        saturated: share of the values at -128, -127 or 127.
        relative_error: |float - int8| / |float|, as norms; None without a reference.
        max_error: largest difference of a value.
    """

    name: str
    values: int
    scale_min: float
    scale_max: float
    saturated: float
    relative_error: float | None = None
    max_error: float | None = None

    @property
    def noise_db(self) -> float | None:
        """Signal-to-noise ratio in decibels, infinite without error; None without a reference."""
        if self.relative_error is None:
            return None
        return math.inf if self.relative_error == 0 else -20 * math.log10(self.relative_error)

    def to_dict(self) -> dict[str, object]:
        """Return the values for JSON, which has no infinity: None stands for it."""
        noise = self.noise_db
        finite = noise if noise is not None and math.isfinite(noise) else None
        return dataclasses.asdict(self) | {"noise_db": finite}


def quantisation_of(
    checkpoint: Path,
    reference: Path | None = None,
    *,
    config: GrokConfig | None = None,
    layers: int | None = None,
    on_needs: OnNeeds = lambda needs: None,
) -> list[QuantisedTensor]:
    """Return every int8 tensor of a checkpoint, the worst first.

    Worst is the largest relative error, or without a reference the largest share of saturated
    values.

    Args:
        checkpoint: folder of a checkpoint or store.
        reference: the weights in float, as a safetensors file or a folder of such, under the names
            and in the layout of `export.parameters`.
        config: of the checkpoint, if it has no `config.json` and is not Grok-1.
        layers: only the first so many.
        on_needs: gets what that needs, before any weights are read.

    Raises:
        CheckpointError: the checkpoint is damaged, or the reference lacks tensors of it.
    """
    _, index = open_weights(checkpoint, config, layers)
    names = [weight.name for weight in index if weight.dtype == "int8"]
    floats = None if reference is None else _reference(reference, index, names)
    on_needs(_needs(index, names, floats))
    total = sum(index[name].nbytes for name in names)
    with progress_bar("reading", total, unit="bytes") as advance:
        tensors = []
        for name in names:
            tensors.append(_measured(index, name, floats))
            advance(index[name].nbytes)
    return sorted(
        tensors, key=lambda tensor: (tensor.relative_error or 0.0, tensor.saturated), reverse=True
    )


def _needs(index: WeightIndex, names: list[str], floats: WeightIndex | None) -> Needs:
    """Return what going through the matrices of these names takes."""
    total = sum(index[name].nbytes for name in names)
    mapped = max((index.files[index[name].file] for name in names), default=0)
    if floats is None:
        return Needs(memory=MEMORY, mapped=mapped, seconds=total / COUNT_RATE)
    files = {floats.root / floats[name].file for name in names}
    mapped += max(path.stat().st_size for path in files)
    return Needs(memory=2 * MEMORY, mapped=mapped, seconds=total / COMPARE_RATE)


def _reference(path: Path, index: WeightIndex, names: list[str]) -> WeightIndex:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError(f"{path} holds no .safetensors file; give the float weights")
    weights: dict[str, Weight] = {}
    for file in files:
        weights |= read_store_header(file)
    faults = []
    for name in names:
        if name not in weights:
            faults.append(f"{name} is missing")
        elif weights[name].dtype == "int8" or weights[name].shape != index[name].shape:
            faults.append(
                f"{name} is {weights[name].dtype}{list(weights[name].shape)}, "
                f"must be a float of {list(index[name].shape)}"
            )
    if faults:
        raise CheckpointError(f"{path} is not what this checkpoint was made from:", faults[:20])
    return WeightIndex(root=files[0].parent, weights=weights, files={})


def _measured(index: WeightIndex, name: str, floats: WeightIndex | None) -> QuantisedTensor:
    reader = WeightReader(index.root)
    weight = index[name]
    scales = reader.read(index[name.removesuffix(".weight") + ".scales"]).astype(np.float32)
    float_reader = None if floats is None else WeightReader(floats.root)
    saturated = 0
    square, difference, largest = 0.0, 0.0, 0.0
    for part, scale in _blocks(weight, scales.shape[-2]):
        codes = reader.read(part)
        saturated += int((np.abs(codes.astype(np.int16)) >= 127).sum())
        if floats is None or float_reader is None:
            continue
        source = dataclasses.replace(
            floats[name],
            shape=part.shape,
            offset=floats[name].offset
            + (part.offset - weight.offset) * floats[name].nbytes // weight.nbytes,
        )
        exact = float_reader.read(source).astype(np.float32)
        error = exact - codes * scales[scale]
        square += float(np.square(exact, dtype=np.float64).sum())
        difference += float(np.square(error, dtype=np.float64).sum())
        largest = max(largest, float(np.abs(error).max()))
    known = floats is not None
    return QuantisedTensor(
        name=name.removesuffix(".weight"),
        values=weight.size,
        scale_min=float(scales.min()),
        scale_max=float(scales.max()),
        saturated=saturated / weight.size,
        relative_error=math.sqrt(difference / square) if known and square else None,
        max_error=largest if known else None,
    )


def _blocks(weight: Weight, groups: int) -> Iterator[tuple[Weight, tuple[int, ...]]]:
    """Yield parts of some rows each, with the index of the scales that are theirs."""
    *lead, rows, columns = weight.shape
    height = rows // groups
    step = max(1, BLOCK // columns)
    for index in np.ndindex(*lead):
        matrix = weight.block(*index)
        for group in range(groups):
            for first in range(group * height, (group + 1) * height, step):
                end = min(first + step, (group + 1) * height)
                yield (
                    dataclasses.replace(
                        matrix,
                        shape=(end - first, columns),
                        offset=matrix.offset + first * columns,
                    ),
                    (*index, group),
                )
