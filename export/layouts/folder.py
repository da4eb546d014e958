"""The files of a folder in another layout: their tensors by name, and the rank each is for."""

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from export_grok.errors import CheckpointError, UnsafePickleError
from export_grok.export.layouts.source_tensor import SourceTensor
from export_grok.export.layouts.torch_file import torch_tensors
from export_grok.export.safetensors_header import read_store_header
from export_grok.regular_file import read_regular

__all__ = ["Folder", "Found", "read_folder"]

# What trainers write beside the weights.
_NO_WEIGHTS = {"training_args.bin", "optimizer.bin", "scheduler.bin"}

# How files for one rank of a tensor-parallel group are named; what all ranks need is `common`.
_RANK = re.compile(r".*-TP-(\d{3}|common)\.safetensors|.*-(\d{3})\.bin")


@dataclass(frozen=True)
class Found:
    """A tensor in a file.

    Attributes:
        rank: that the file is for; None if it is for all.
        tensor: where it lies.
    """

    rank: int | None
    tensor: SourceTensor


@dataclass
class Folder:
    """What the files of a folder hold.

    Attributes:
        lengths: of the files in bytes, by name.
        tensors: by name, each as often as it stands in files.
        missing: files that the index names and that are not there, with the names it gives them.
        damaged: what is wrong with files.
        unsafe: files that ask for something that is no tensor.
    """

    lengths: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[str, list[str]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)


def read_folder(path: Path) -> Folder:
    """Return what the weight files in `path` hold, by their headers.

    Those that an index (`*.index.json`) names, or all; safetensors, or if there are none, torch's
    `.bin`.

    Raises:
        CheckpointError: there are no such files, or the index cannot be read.
        MissingDependencyError: there are `.bin` files and no torch.
    """
    try:
        names = sorted(set(os.listdir(path)) - _NO_WEIGHTS)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}; give the folder of the weights"
        ) from error
    folder = Folder()
    for suffix in (".safetensors", ".bin"):
        indices = [name for name in names if name.endswith(f"{suffix}.index.json")]
        files = [name for name in names if name.endswith(suffix)]
        if not files and not indices:
            continue
        if len(indices) > 1:
            raise CheckpointError(
                f"{path} holds {len(indices)} indices ({', '.join(indices)}); leave the one of "
                "the weights that are wanted"
            )
        if indices:
            indexed = _indexed(path / indices[0])
            folder.missing = {file: held for file, held in indexed.items() if file not in names}
            files = [file for file in indexed if file in names]
        for file in files:
            _read(path / file, folder)
        return folder
    raise CheckpointError(
        f"{path} holds no weights in a layout that is known: neither ckpt-0/tensor00000_000, nor "
        "a store, nor .safetensors, nor .bin files; give the folder of a checkpoint"
    )


def _indexed(path: Path) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, as the index says."""
    try:
        table = json.loads(read_regular(path))["weight_map"]
        indexed: dict[str, list[str]] = defaultdict(list)
        for name, file in table.items():
            if not file or not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{name} lies in {file!r}, which is no file beside it")
            indexed[file].append(name)
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no index of weights ({error!r}); get it again"
        ) from error
    return indexed


def _read(path: Path, folder: Folder) -> None:
    try:
        if path.suffix == ".bin":
            tensors = torch_tensors(path)
        else:
            stored = read_store_header(path)
            tensors = {name: SourceTensor(weight=weight) for name, weight in stored.items()}
        folder.lengths[path.name] = path.stat().st_size
    except UnsafePickleError as error:
        folder.unsafe.append(str(error))
        return
    except CheckpointError as error:
        folder.damaged.append(str(error))
        return
    except OSError as error:
        folder.damaged.append(f"{path} cannot be read: {error.strerror or error}")
        return
    found = _RANK.fullmatch(path.name)
    number = (found[1] or found[2]) if found else "common"
    rank = None if number == "common" else int(number)
    for name, tensor in tensors.items():
        folder.tensors[name].append(Found(rank, tensor))
