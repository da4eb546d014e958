"""Weights in other layouts, as they are on a hub: safetensors with an index."""

import math
from pathlib import Path
from random import Random
from typing import ClassVar

from export_grok.export.layouts import foreign_source
from export_grok.export.parameters import model_parameters
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.export.weights_to.export import plan_export
from export_grok.export.weights_to.options import WeightsOptions
from export_grok.weights import NUMPY_DTYPES
from scripts.fuzzing.edits import edited_json, odd_entry
from scripts.fuzzing.files import Files, Placed
from scripts.fuzzing.target import Target
from scripts.fuzzing.targets.released import SMALL, files_below
from scripts.fuzzing.targets.stored import edited_safetensors

__all__ = ["HfTarget"]


class HfTarget(Target):
    """A folder of safetensors files with an index, as they are on a hub."""

    name = "hf-index"
    inputs: ClassVar[int] = 400

    def __init__(self, folder: Path) -> None:
        self.placed = Placed(folder / "weights", self._whole(_written(folder)))
        self._outside = folder / "outside"
        self._outside.write_bytes(b"{}")
        self._sums()  # what it imports is here from now on

    def _whole(self, folder: Path) -> Files:
        return files_below(folder)

    def edit(self, files: Files, random: Random) -> None:
        """Change the index, the config or a file, or which there are."""
        names = sorted(name for name, content in files.items() if isinstance(content, bytes))
        name = random.choice([*names, *(name for name in names if name.endswith(".json"))] or [""])
        content = files.get(name)
        if not isinstance(content, bytes) or random.randrange(6) == 0:
            if files:
                odd_entry(files, random, str(self._outside))
        elif name.endswith(".json"):
            files[name] = edited_json(content, random)
        else:
            files[name] = self._edited(content, random)

    @staticmethod
    def _edited(content: bytes, random: Random) -> bytes:
        return edited_safetensors(content, random)

    def read(self) -> dict[str, int]:
        """Read all tensors, made int8 where they are."""
        return self._sums()

    def _sums(self) -> dict[str, int]:
        source = foreign_source(self.folder)
        lengths = {}
        for name, parameter in model_parameters(source.config).items():
            lengths[name] = sum(map(len, source.blocks(name)))
            size = math.prod(parameter.shape) * NUMPY_DTYPES[parameter.dtype].itemsize
            assert lengths[name] == size
        source.sha256(lengths)
        return lengths

    def hold(self, said: dict[str, int]) -> None:
        """Nothing more: every tensor came with as many bytes as it must have."""


def _written(folder: Path) -> Path:
    """Return the folder of a small model by the names of a peer."""
    write_random_checkpoint(SMALL, folder / "checkpoint")
    options = WeightsOptions(to="hf")
    plan_export(folder / "checkpoint", folder / "whole", options).folder.write()
    return folder / "whole"
