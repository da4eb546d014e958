"""From parts in files to the tensors of a model: all there, none too many, each of its shape."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from export_grok.config import TENSOR_PARALLEL_SIZES, GrokConfig
from export_grok.export.layouts.folder import Folder
from export_grok.export.layouts.matrix import Matrix, Part
from export_grok.export.layouts.names import EMBEDDING, FINAL_NORM, HEAD, ROUTER, Place
from export_grok.export.layouts.parts import Parts
from export_grok.export.parameters import model_parameters

__all__ = ["Assembled", "assembled"]

# Matrices whose input is shared by ranks; of other matrices it is the output. Ranks have the
# whole router.
_BY_INPUT = {"attention.out.weight", "experts.down.weight"}


@dataclass
class Assembled:
    """The tensors of a model.

    Attributes:
        matrices: those that are right.
        misfits: faults: tensors of another shape.
        faults: all others.
    """

    matrices: dict[Place, Matrix] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def assembled(
    parts: Parts, folder: Folder, whole: GrokConfig, wanted: GrokConfig, source: str
) -> Assembled:
    """Return the tensors of a model, and everything that is wrong with them.

    Args:
        parts: what was found.
        folder: where it was found.
        whole: config of all that may be there.
        wanted: config of the layers that are needed.
        source: where the config comes from, for messages.
    """
    made = Assembled(faults=list(parts.faults))
    needed, allowed = _shapes(wanted), _shapes(whole)
    if Place(HEAD) in parts.places:
        needed[Place(HEAD)] = allowed[Place(HEAD)] = allowed[Place(EMBEDDING)]
    made.faults += sorted(
        f"{parts.layout.name_of(place)} is none of the {whole.num_layers} layers and "
        f"{whole.num_experts} experts of {source}"
        for place in parts.places.keys() - allowed.keys()
    )
    incomplete: dict[str, list[str]] = defaultdict(list)
    for place, shape in needed.items():
        name = parts.layout.name_of(place)
        if found := parts.places.get(place):
            try:
                made.matrices[place] = _joined(name, place, found, shape)
            except LookupError as error:
                incomplete[str(error)].append(name)
            except ValueError as error:
                made.misfits.append(f"{name} {error}; {source} asks for {shape}")
    made.faults += [
        f"{lacking}: they hold parts of {names[0]}" + _more(names)
        for lacking, names in incomplete.items()
    ]
    made.faults += _missing(needed.keys() - parts.places.keys(), parts, folder, wanted)
    return made


def _shapes(config: GrokConfig) -> dict[Place, tuple[int, ...]]:
    """Return every tensor of the model as it is in other layouts, with its shape."""
    shapes: dict[Place, tuple[int, ...]] = {}
    for name, parameter in model_parameters(config).items():
        layer, plain = None, name
        if name.startswith("layers."):
            _, number, plain = name.split(".", 2)
            layer = int(number)
        if name.endswith(".scales"):
            continue
        if plain == EMBEDDING:
            shapes[Place(plain, layer)] = parameter.shape
        elif plain.startswith("experts."):
            for expert in range(config.num_experts):
                shapes[Place(plain, layer, expert)] = parameter.shape[:0:-1]
        else:
            shapes[Place(plain, layer)] = parameter.shape[::-1]
    return shapes


def _joined(
    name: str, place: Place, found: dict[int | None, Part], shape: tuple[int, ...]
) -> Matrix:
    """Return the whole tensor.

    Raises:
        LookupError: ranks are missing; its text says which.
        ValueError: the parts have other shapes; its text says which.
    """
    ranks = sorted(found, key=lambda rank: -1 if rank is None else rank)
    parts = tuple(found[rank] for rank in ranks)
    held = {part.tensor.shape for part in parts}
    if held == {shape}:
        return Matrix(name=name, shape=shape, axis=None, parts=parts)
    axis = 1 if place.parameter in _BY_INPUT else 0
    (one, *others) = held
    cut = None not in found and not others and len(shape) == len(one) == 2
    if not cut or place.parameter == ROUTER or not one[axis] or shape[axis] % one[axis]:
        raise ValueError(f"has shape {' and '.join(map(str, sorted(held)))}")
    count = shape[axis] // one[axis]
    fits = _with_length(shape, axis, one[axis]) == one and found.keys() <= set(range(count))
    if not fits or count not in TENSOR_PARALLEL_SIZES:
        raise ValueError(f"has shape {one} in {len(ranks)} files of ranks")
    if lacking := sorted(set(range(count)) - found.keys()):
        numbers = ", ".join(f"{rank:03}" for rank in lacking)
        raise LookupError(f"the files of ranks {numbers} of {count} are missing")
    return Matrix(name=name, shape=shape, axis=axis, parts=parts)


def _with_length(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _missing(
    places: Iterable[Place], parts: Parts, folder: Folder, config: GrokConfig
) -> list[str]:
    """Return what says which tensors are missing: by file, by layer, or by name."""
    names = {parts.layout.name_of(place): place for place in places}
    faults = []
    for file, held in folder.missing.items():
        if lost := [name for name in held if names.pop(name, None)]:
            faults.append(f"{file} is missing: the index says it holds {lost[0]}" + _more(lost))
    if folder.damaged:  # what these files hold is not known
        return faults
    by_layer: dict[int | None, list[str]] = defaultdict(list)
    for name, place in names.items():
        by_layer[place.layer].append(name)
    in_a_layer = (len(_shapes(config)) - len((EMBEDDING, FINAL_NORM))) // config.num_layers
    for layer, lost in sorted(by_layer.items(), key=lambda item: item[0] or -1):
        if layer is not None and len(lost) == in_a_layer:
            faults.append(f"layer {layer} is missing: {min(lost)}" + _more(lost))
        else:
            faults += [f"{name} is missing" for name in sorted(lost)]
    return faults


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
