"""The tensors of a folder, sorted by what they are in the model."""

from dataclasses import dataclass, field
from pathlib import Path

from export_grok.errors import CheckpointError
from export_grok.export.faults import capped
from export_grok.export.layouts.folder import Folder, Found
from export_grok.export.layouts.matrix import BLOCK, Part
from export_grok.export.layouts.names import EMBEDDING, HEAD, LAYOUTS, Layout, Place
from export_grok.export.layouts.source_tensor import FLOATS, SourceTensor

__all__ = ["Parts", "parts_of", "recognised"]

# What is added to a tensor's name for the factors of its values. Both are multiplied by.
SCALES, BLOCK_SCALES = "_scale", "_scale_inv"


@dataclass
class Parts:
    """What was found of a model.

    Attributes:
        layout: whose names it has.
        places: parts of each tensor by the rank they are for; None is for all ranks. A tensor
            that is among the faults has no parts.
        faults: what cannot be.
    """

    layout: Layout
    places: dict[Place, dict[int | None, Part]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def recognised(path: Path, folder: Folder) -> Layout:
    """Return the layout that the most names in `folder` are of.

    Raises:
        CheckpointError: no name is of any layout.
    """
    counts = {
        layout.name: sum(layout.place_of(name) is not None for name in folder.tensors)
        for layout in LAYOUTS
    }
    best = max(LAYOUTS, key=lambda layout: counts[layout.name])
    if not counts[best.name]:
        raise capped(
            CheckpointError,
            f"{path} is in no layout of Grok-1 that is known (they are "
            f"{', '.join(counts)}); its tensors are:",
            sorted(folder.tensors),
        )
    return best


def parts_of(layout: Layout, folder: Folder) -> Parts:
    """Return the tensors of `folder` by what they are, and everything that cannot be one."""
    parts = Parts(layout)
    for name, founds in sorted(folder.tensors.items()):
        place = layout.place_of(name)
        if place is not None:
            _add(parts, place, name, founds, folder)
        elif not layout.ignores(name) and not _is_scale_of_one(name, folder):
            files = ", ".join(sorted({found.tensor.weight.file for found in founds}))
            parts.faults.append(f"{name} ({files}) is no tensor of Grok-1 in layout {layout.name}")
    if Place(EMBEDDING) not in parts.places and Place(HEAD) in parts.places:
        # Of two names for one tensor some programs write only the other.
        parts.places[Place(EMBEDDING)] = parts.places.pop(Place(HEAD))
    return parts


def _is_scale_of_one(name: str, folder: Folder) -> bool:
    return any(
        name.endswith(suffix) and name.removesuffix(suffix) in folder.tensors
        for suffix in (BLOCK_SCALES, SCALES)
    )


def _add(parts: Parts, place: Place, name: str, founds: list[Found], folder: Folder) -> None:
    ranks = [found.rank for found in founds]
    if len(set(ranks)) != len(ranks) or (None in ranks and len(ranks) > 1):
        files = ", ".join(found.tensor.weight.file for found in founds)
        parts.faults.append(f"{name} stands in several files: {files}; leave one of them")
        parts.places[place] = {}
        return
    try:
        parts.places[place] = {found.rank: _part(name, found, folder) for found in founds}
    except ValueError as error:
        parts.faults.append(f"{name} {error}")
        parts.places[place] = {}


def _part(name: str, found: Found, folder: Folder) -> Part:
    """Return the tensor with its scales; ValueError says what is wrong with it."""
    tensor = found.tensor
    if tensor.dtype not in FLOATS:
        known = ", ".join(FLOATS)
        raise ValueError(f"({tensor.weight.file}) has dtype {tensor.dtype}; read are {known}")
    scales = {
        suffix: scale
        for suffix in (SCALES, BLOCK_SCALES)
        if (scale := _beside(f"{name}{suffix}", found.rank, folder))
    }
    if not tensor.dtype.startswith("float8"):
        if scales:
            raise ValueError(f"is {tensor.dtype}, with scales; only float8 has them")
        return Part(tensor=tensor)
    if len(scales) != 1 or len(tensor.shape) != 2:
        raise ValueError(
            f"is {tensor.dtype} {tensor.shape} with {len(scales)} tensors of scales; a matrix "
            f"with {SCALES} or {BLOCK_SCALES} behind its name is needed"
        )
    ((suffix, scale),) = scales.items()
    rows, columns = tensor.shape
    in_blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    blocks = suffix == BLOCK_SCALES and scale.weight.size != 1
    fitting = {in_blocks} if blocks else {(), (1,), (1, 1), (rows,), (rows, 1)}
    if scale.shape not in fitting or scale.dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"is {tensor.shape} and its {suffix} {scale.dtype} {scale.shape}; floats of shape "
            f"{' or '.join(map(str, sorted(fitting)))} are needed"
        )
    return Part(tensor=tensor, scales=scale, blocks=blocks)


def _beside(name: str, rank: int | None, folder: Folder) -> SourceTensor | None:
    """Return the tensor of that name for a rank, or for all; ValueError if it is there twice."""
    founds = folder.tensors.get(name, [])
    if len({found.rank for found in founds}) != len(founds):
        raise ValueError(f"has scales {name} in several files; leave one of them")
    by_rank = {found.rank: found.tensor for found in founds}
    return by_rank.get(rank, by_rank.get(None))
