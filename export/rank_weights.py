"""The weights of ranks, each with files of its own: its part of every tensor, packed once.

    rank_0/weights.json         where the tensors of rank 0 lie, by the names of the whole ones
    rank_0/layer_00.weights     its parts of layers.0.experts.gate.weight, ...
    rank_0/embedding.weights    of embedding.weight, final_norm.scale, and of an int8 head
    rank_1/...

Ranks differ in the content of these files only, so the same graphs serve all of them. Every tensor
begins at a multiple of 64 bytes; parts are those of `export.partition`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import WEIGHT_INDEX, rank_folder
from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.parameters import Parameter, head_parameters
from export_grok.export.partition import cut_axis, part_of, share
from export_grok.export.store.folder import store_files
from export_grok.export.store.target import StoreTarget
from export_grok.files import atomic_file, output_errors
from export_grok.weights import Weight, WeightIndex, WeightReader

__all__ = ["part_blocks", "rank_index", "write_ranks"]

ALIGNMENT = 64
BLOCK_BYTES = 8 << 20


def rank_index(
    config: GrokConfig, index: WeightIndex, head: WeightIndex, out: Path, ranks: int
) -> WeightIndex:
    """Return where the tensors of rank 0 will lie, and so those of every other.

    Args:
        config: of the model.
        index: where the whole tensors lie.
        head: those of the heads; the same, or that of an int8 head.
        out: folder of the bundle.
        ranks: that share the model.

    Raises:
        CheckpointError: tensors are missing or not those of the model; all are named.
        ConfigError: so many ranks cannot share the model evenly.
    """
    rank = config.for_rank(ranks)
    weights: dict[str, Weight] = {}
    files = {}
    faults = []
    for file, parameters in _files(config, head).items():
        end = 0
        for name, parameter in parameters.items():
            faults += _faults(parameter, _whole(name, index, head), ranks)
            axis = cut_axis(name, parameter.shape, rank)
            groups = parameter.groups
            if groups is not None and axis == len(parameter.shape) - 2:
                groups = rank.row_parallel_scale_groups
            weights[name] = Weight(
                name=name,
                file=file,
                offset=end + -end % ALIGNMENT,
                dtype=parameter.dtype,
                shape=share(parameter.shape, axis, ranks),
                groups=groups,
            )
            end = weights[name].offset + weights[name].nbytes
        files[file] = end
    if faults:
        raise CheckpointError(
            f"{len(faults)} tensors cannot be shared by {ranks} ranks; the weights are of another "
            "model, or damaged: get them again",
            faults,
        )
    return WeightIndex(root=out / rank_folder(0), weights=weights, files=files)


def write_ranks(
    config: GrokConfig,
    index: WeightIndex,
    head: WeightIndex,
    out: Path,
    ranks: int,
    *,
    resume: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Write the files of all ranks into the folder `out`; return their names.

    Bytes are copied as they are, in blocks of 8 MiB; zeros become holes. Every file appears
    whole, or not at all.

    Args:
        config: of the model.
        index: where the whole tensors lie.
        head: those of the heads; the same, or that of an int8 head.
        out: folder of the bundle.
        ranks: that share the model.
        resume: keep files that an earlier call for the same weights and ranks has written.
        progress: takes how many bytes of weights were written, or found, since its last call.

    Raises:
        CheckpointError: a tensor is missing, not that of the model, or cannot be read to its end.
        ConfigError: so many ranks cannot share the model evenly.
        OutputError: `out` cannot be written.
    """
    planned = rank_index(config, index, head, out, ranks)
    for number in range(ranks):
        with output_errors(out):
            (out / rank_folder(number)).mkdir(exist_ok=True)
    names = []
    for file, length in planned.files.items():
        parts = [weight for weight in planned if weight.file == file]
        # File by file, not rank by rank: what the system has read of a layer serves them all.
        for number in range(ranks):
            name = f"{rank_folder(number)}/{file}"
            names.append(name)
            if resume and _has_length(out / name, length):
                progress(length)
                continue
            with atomic_file(out / name) as opened:
                target = StoreTarget(opened, out / name, length)
                for part in parts:
                    source = head if part.name in head.weights else index
                    at = part.offset
                    for block in part_blocks(source, config, part.name, ranks, number):
                        target.write(block.reshape(-1).view(np.uint8).data, at)
                        at += block.nbytes
                        progress(block.nbytes)
    for number in range(ranks):
        name = f"{rank_folder(number)}/{WEIGHT_INDEX}"
        names.append(name)
        planned.write(out / name)
    return names


def part_blocks(
    index: WeightIndex, config: GrokConfig, name: str, ranks: int, rank: int
) -> Iterator[NDArray[Any]]:
    """Yield a rank's part of a tensor in the order of its elements, in blocks of up to 8 MiB.

    Nothing else of the tensor is read, but for what shares a page with it.

    Args:
        index: where the whole lies.
        config: of the model.
        name: of the tensor.
        ranks: that share it.
        rank: whose part.

    Raises:
        CheckpointError: its file cannot be read to its end.
    """
    whole = index[name]
    axis = cut_axis(name, whole.shape, config.for_rank(ranks))
    yield from _blocks(index.root, whole, axis, ranks, rank)


def _blocks(
    root: Path, weight: Weight, axis: int | None, ranks: int, rank: int
) -> Iterator[NDArray[Any]]:
    if len(weight.shape) > 2:  # the matrices of all experts, none of which is cut apart
        for expert in range(weight.shape[0]):
            inner = None if axis is None else axis - 1
            yield from _blocks(root, weight.block(expert), inner, ranks, rank)
        return
    # A reader of its own for each matrix: what it has mapped leaves memory with it.
    part = part_of(WeightReader(root).read(weight), axis, rank, ranks)
    rows = max(1, BLOCK_BYTES // part[:1].nbytes)
    for first in range(0, len(part), rows):
        yield np.ascontiguousarray(part[first : first + rows])


def _files(config: GrokConfig, head: WeightIndex) -> dict[str, dict[str, Parameter]]:
    """Return what each file of a rank holds: whole parameters by name, by file name."""
    files = {
        f"{Path(file).stem}.weights": parameters
        for file, parameters in store_files(config).items()
    }
    own_head = head_parameters(config)
    if own_head.keys() <= head.weights.keys():
        files["embedding.weights"] |= own_head
    return files


def _whole(name: str, index: WeightIndex, head: WeightIndex) -> Weight | None:
    return head.weights.get(name) or index.weights.get(name)


def _faults(parameter: Parameter, whole: Weight | None, ranks: int) -> list[str]:
    name = parameter.name
    if whole is None:
        return [f"{name} is missing"]
    if whole.groups not in (None, parameter.groups):
        return [
            f"{name} has {whole.groups} groups of rows; the model has {parameter.groups}, which "
            f"{ranks} ranks share"
        ]
    if (whole.dtype, whole.shape) != (parameter.dtype, parameter.shape):
        return [
            f"{name} is {whole.dtype} {list(whole.shape)}; "
            f"{ranks} ranks share {parameter.dtype} {list(parameter.shape)}"
        ]
    return []


def _has_length(path: Path, length: int) -> bool:
    try:
        return path.stat().st_size == length
    except OSError:
        return False
