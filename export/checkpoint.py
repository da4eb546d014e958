"""A folder of weights, recognised and checked: from files to the index of all tensors.

Known are the released checkpoint (`ckpt-0/tensor00000_000`, ...) and our store. Only headers are
read, a few hundred bytes a file.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from export_grok.config import GROK_1, GrokConfig
from export_grok.errors import CheckpointError, ConfigError
from export_grok.export.faults import Faults
from export_grok.export.parameters import Parameter, model_parameters
from export_grok.export.released_pickle import arrays_in
from export_grok.export.safetensors_header import read_store_header
from export_grok.export.store.folder import is_half_made, store_files
from export_grok.weights import Weight, WeightIndex

__all__ = [
    "RELEASED_FOLDER",
    "FoundWeights",
    "find_weights",
    "first_layers",
    "holds_weights",
    "open_weights",
    "released_files",
]

RELEASED_FOLDER = "ckpt-0"

# The parameters of a layer in the order of the released files.
_LAYER_ORDER = (
    "experts.gate",
    "experts.down",
    "experts.up",
    "attention.key",
    "attention.out",
    "attention.query",
    "attention.value",
    "pre_attn_norm.scale",
    "post_attn_norm.scale",
    "pre_moe_norm.scale",
    "post_moe_norm.scale",
    "router.weight",
)

Files = dict[str, dict[str, Parameter]]


def released_files(config: GrokConfig) -> Files:
    """Return what each released file holds: parameters by file name and by their key in it.

    The keys are `weight` and `scales`, or `array`.
    """
    parameters = model_parameters(config)
    names = ["embedding.weight", "final_norm.scale"]
    # The release numbered its files by sorted module names: layer 10 comes before layer 2.
    for layer in sorted(range(config.num_layers), key=str):
        names += (f"layers.{layer}.{name}" for name in _LAYER_ORDER)
    return {
        f"tensor{number:05}_000": (
            {"array": parameters[name]}
            if name in parameters
            else {key: parameters[f"{name}.{key}"] for key in ("weight", "scales")}
        )
        for number, name in enumerate(names)
    }


def open_weights(
    path: Path, config: GrokConfig | None = None, layers: int | None = None
) -> tuple[GrokConfig, WeightIndex]:
    """Return the config of the weights in `path`, and where each tensor lies.

    Args:
        path: the root of the index: a folder with a released checkpoint, or with a store.
        config: hyper-parameters of the whole checkpoint. Without it those in `config.json` in
            `path`, or beside `ckpt-0`; else those of Grok-1.
        layers: take only the first so many layers. The files of the others need not be there.

    Raises:
        CheckpointError: files are missing, damaged, too many or not those of the config. All
            faults are found before it is raised; its text shows the first of them.
        ConfigError: the config cannot be read, or has fewer layers than `layers`.
        UnsafePickleError: files ask for something that is no array.
    """
    found = find_weights(path, config, layers)
    found.faults.check(path, found.source)
    return found.config, found.index


@dataclass(frozen=True, kw_only=True)
class FoundWeights:
    """What a folder of weights holds, right or wrong.

    Attributes:
        layout: "released" or "store".
        config: of the tensors.
        source: where the config is from, in words.
        index: of the tensors in files that can be read; without faults these are all.
        faults: what is wrong, but for the values.
    """

    layout: str
    config: GrokConfig
    source: str
    index: WeightIndex
    faults: Faults


def find_weights(
    path: Path, config: GrokConfig | None = None, layers: int | None = None
) -> FoundWeights:
    """Return what the weights in `path` are, and what is wrong with them.

    The arguments are those of `open_weights`, which raises what is wrong.

    Raises:
        CheckpointError: `path` is no folder of weights, or a store that is half made.
        ConfigError: the config cannot be read, or has fewer layers than `layers`.
    """
    if is_half_made(path):
        raise CheckpointError(
            f"{path} is half made: its import was broken off, or is still running; run "
            "export-grok import again, and it goes on"
        )
    kind = _recognised(path)
    whole, source = (config, "the given config") if config else _found_config(path)
    part = first_layers(whole, layers, source)
    faults = Faults()
    files = kind.files(whole)
    faults.other += _surplus(path / kind.folder, kind, files, source)

    wanted = model_parameters(part)
    weights: dict[str, Weight] = {}
    lengths: dict[str, int] = {}
    for file, parameters in files.items():
        if not any(parameter.name in wanted for parameter in parameters.values()):
            continue
        place = f"{kind.folder}/{file}" if kind.folder else file
        found = faults.collect(path / place, parameters, kind.read)
        for weight in found:
            lengths[place] = (path / place).stat().st_size
            weights[weight.name] = dataclasses.replace(weight, file=place)
    ordered = {name: weights[name] for name in wanted if name in weights}
    return FoundWeights(
        layout=kind.layout,
        config=part,
        source=source,
        index=WeightIndex(root=path, weights=ordered, files=lengths),
        faults=faults,
    )


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How a kind of checkpoint is stored.

    Attributes:
        layout: its name.
        folder: of the files, below the checkpoint.
        pattern: of the names of files that must not be there unless the config asks for them.
        files: from the config to what each file holds.
        read: from a file to its tensors, by the keys in `files`.
    """

    layout: str
    folder: str
    pattern: re.Pattern[str]
    files: Callable[[GrokConfig], Files]
    read: Callable[[Path], dict[str, Weight]]


_RELEASED = _Kind(
    layout="released",
    folder=RELEASED_FOLDER,
    pattern=re.compile(r"tensor\d+_\d+"),
    files=released_files,
    read=arrays_in,
)
_STORE = _Kind(
    layout="store",
    folder="",
    pattern=re.compile(r"(embedding|layer_\d+)\.safetensors"),
    files=store_files,
    read=read_store_header,
)


def holds_weights(path: Path) -> bool:
    """Return whether `path` is the folder of a checkpoint or a store, whole or not."""
    if is_half_made(path):
        return True
    try:
        _recognised(path)
    except CheckpointError:
        return False
    return True


def _recognised(path: Path) -> _Kind:
    names = _names(path)
    if (path / RELEASED_FOLDER).is_dir():
        return _RELEASED
    if any(map(_RELEASED.pattern.fullmatch, names)):
        return dataclasses.replace(_RELEASED, folder="")
    if any(map(_STORE.pattern.fullmatch, names)):
        return _STORE
    raise CheckpointError(
        f"{path} holds no checkpoint; a folder with {RELEASED_FOLDER}/tensor00000_000 or with "
        "embedding.safetensors is needed"
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror or error}; give the folder of a checkpoint"
        ) from error


def _found_config(path: Path) -> tuple[GrokConfig, str]:
    places = [path / "config.json"]
    if path.resolve().name == RELEASED_FOLDER:
        places.append(path.resolve().parent / "config.json")
    for place in places:
        if place.exists():
            return GrokConfig.from_file(place), str(place)
    return GROK_1, "the published Grok-1 (there is no config.json)"


def first_layers(config: GrokConfig, layers: int | None, source: str) -> GrokConfig:
    """Return the config of the first `layers` of a model, or of all.

    Raises:
        ConfigError: `source`, where the config is from, has fewer.
    """
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise ConfigError(
            f"{layers} layers were asked for; {source} has {config.num_layers}: "
            f"use 1 to {config.num_layers}"
        )
    return dataclasses.replace(config, num_layers=layers)


def _surplus(folder: Path, kind: _Kind, files: Files, source: str) -> list[str]:
    return [
        f"{name} is there, but is none of the {len(files)} files of {source}"
        for name in _names(folder)
        if kind.pattern.fullmatch(name) and name not in files
    ]
