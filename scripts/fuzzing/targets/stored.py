"""The files of a store: safetensors, one by one, and a folder of them as an import leaves it."""

import json
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from export_grok.config import GrokConfig
from export_grok.export.checkpoint import open_weights
from export_grok.export.index_source import IndexSource
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.export.safetensors_header import read_store_header
from export_grok.export.store.folder import IMPORT_PLAN, STORE_MANIFEST, store_files
from export_grok.export.store.importing import Import, planned_import
from export_grok.export.store.manifest import StoreManifest
from export_grok.export.store.plan import plan_of
from export_grok.weights import Weight, WeightIndex, WeightReader
from scripts.fuzzing.edits import (
    edited_bytes,
    edited_json,
    edited_table,
    odd_entry,
    prefixed_length,
)
from scripts.fuzzing.files import Content, Files, Placed
from scripts.fuzzing.target import Target
from scripts.fuzzing.targets.released import SMALL, check_lies_within, files_below

__all__ = ["ImportTarget", "SafetensorsTarget", "StoreTarget", "edited_safetensors"]


def edited_safetensors(content: bytes, random: Random) -> bytes:
    """Return a safetensors file with one thing changed: in its header, its length, or after it."""
    length = int.from_bytes(content[:8], "little")
    text, rest = content[8 : 8 + length], content[8 + length :]
    kind = random.randrange(8)
    if kind == 0 or not text:
        return edited_bytes(content, random, [(0, 7), (0, 200), (0, len(content) - 1)])
    if kind == 1:
        return content[: random.randrange(len(content))]
    if kind < 4:
        return prefixed_length(edited_json(text, random), random) + rest
    try:
        header = json.loads(text)
    except (RecursionError, ValueError):
        return edited_bytes(content, random)
    if isinstance(header, dict) and header and kind < 7:
        _move(header, random)
    else:
        edited_table(header, random)
    return prefixed_length(json.dumps(header).encode("utf-8", "surrogatepass"), random) + rest


def _move(header: dict[str, Any], random: Random) -> None:
    """Let a tensor lie elsewhere, have another shape or dtype, or stand twice, in place."""
    name = random.choice(list(header))
    entry = header[name]
    match random.randrange(5):
        case 0:
            header[f"{name}x"] = entry
        case 1:
            header["__metadata__"] = random.choice(({"a": "b"}, {"a": 1}, [], None, "x", {}))
        case _ if not isinstance(entry, dict):
            header[name] = {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}
        case 2:
            entry["shape"] = random.choice(
                ([], [0], [-1, -1], [2**32, 2**32], [2**63], [1] * 1000, [2, 2], [True])
            )
        case 3:
            entry["dtype"] = random.choice(("I8", "F32", "BF16", "F16", "U64", "BOOL", "x"))
        case _:
            other = header[random.choice(list(header))]
            if isinstance(other, dict):
                entry["data_offsets"] = other.get("data_offsets")


def _whole_store(folder: Path) -> Path:
    write_random_checkpoint(SMALL, folder / "checkpoint")
    source = IndexSource(*open_weights(folder / "checkpoint"))
    planned_import(source, folder / "whole").run(workers=1)
    return folder / "whole"


class SafetensorsTarget(Target):
    """A file of a store."""

    name = "safetensors"
    inputs: ClassVar[int] = 3000
    _file = "layer_00.safetensors"

    def __init__(self, folder: Path) -> None:
        content = (_whole_store(folder) / self._file).read_bytes()
        self.placed = Placed(folder / "file", {self._file: content})

    def edit(self, files: Files, random: Random) -> None:
        """Change its header."""
        content = files[self._file]
        assert isinstance(content, bytes)
        files[self._file] = edited_safetensors(content, random)

    def read(self) -> dict[str, Weight]:
        """Read its header."""
        return read_store_header(self.folder / self._file)

    def hold(self, said: dict[str, Weight]) -> None:
        """See that all tensors lie in it."""
        path = self.folder / self._file
        check_lies_within(list(said.values()), {path.name: path.stat().st_size})
        reader = WeightReader(self.folder)
        for name, weight in said.items():
            assert (weight.name, weight.file) == (name, path.name)
            assert reader.read(weight).shape == weight.shape


class StoreTarget(Target):
    """A folder that an import has written."""

    name = "store"
    inputs: ClassVar[int] = 400

    def __init__(self, folder: Path) -> None:
        whole = files_below(_whole_store(folder))
        self._outside = folder / "outside"
        self._outside.write_bytes(b"{}")
        self.placed = Placed(folder / "store", whole)

    def edit(self, files: Files, random: Random) -> None:
        """Change a file, its manifest or config more often, or which files there are."""
        names = sorted(name for name, content in files.items() if isinstance(content, bytes))
        name = random.choice(names) if names else ""
        told = {STORE_MANIFEST, IMPORT_PLAN} & {*names}
        if told and random.randrange(3) == 0:
            name = random.choice(sorted(told))
        content: Content | None = files.get(name)
        if not isinstance(content, bytes) or random.randrange(6) == 0:
            if files:
                odd_entry(files, random, str(self._outside))
        elif name.endswith(".json"):
            files[name] = edited_json(content, random)
            if random.randrange(8) == 0:
                files[IMPORT_PLAN] = edited_json(content, random)
        else:
            files[name] = edited_safetensors(content, random)

    def read(self) -> tuple[StoreManifest | None, tuple[GrokConfig, WeightIndex]]:
        """Read its manifest, and index its files."""
        return StoreManifest.read(self.folder), open_weights(self.folder)

    def hold(self, said: tuple[StoreManifest | None, tuple[GrokConfig, WeightIndex]]) -> None:
        """See that all tensors lie in the files."""
        _, (_, index) = said
        lengths = {file: (self.folder / file).stat().st_size for file in index.files}
        assert lengths == index.files
        check_lies_within(list(index), lengths)


class ImportTarget(StoreTarget):
    """A folder of which an import was broken off just before its end, and which is to go on."""

    name = "import"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.beside = folder / "checkpoint"
        self._source = IndexSource(*open_weights(self.beside))
        whole = dict(self.placed.whole)
        del whole[STORE_MANIFEST]
        whole[IMPORT_PLAN] = json.dumps(plan_of(self._source)).encode()
        self.placed = Placed(folder / "half", whole)

    def read(self) -> Import:
        """Plan to begin again, and to go on."""
        planned_import(self._source, self.folder, overwrite=True)
        return planned_import(self._source, self.folder)

    def hold(self, said: Import) -> None:
        """See that what stays is as long as it must be, and all else is written."""
        assert {file.name for file in (*said.kept, *said.missing)} == set(store_files(SMALL))
        assert not said.done
        for file in said.kept:
            assert (self.folder / file.name).stat().st_size == file.size
