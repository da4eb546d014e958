"""What a bundle says of itself: its manifest, and its weight index."""

import dataclasses
import json
import math
from pathlib import Path
from random import Random
from typing import ClassVar

from export_grok.artifacts import (
    HEAD_WEIGHTS,
    MANIFEST,
    WEIGHT_INDEX,
    Bundle,
    open_bundle,
    record_of,
    write_manifest,
)
from export_grok.config import DTYPES, GrokConfig
from export_grok.files import fingerprint
from export_grok.manifest import HeadError, Manifest, WeightsPlace
from export_grok.weights import Weight, WeightIndex, WeightReader
from scripts.fuzzing.edits import edited_json, odd_entry
from scripts.fuzzing.files import Files, Placed
from scripts.fuzzing.target import Target
from scripts.fuzzing.targets.released import SMALL, files_below

__all__ = ["IndexTarget", "ManifestTarget", "write_bundle"]


class ManifestTarget(Target):
    """The manifest of a bundle of made-up graphs, with its weights beside the graphs."""

    name = "manifest"
    inputs: ClassVar[int] = 2500

    def __init__(self, folder: Path) -> None:
        whole = folder / "whole"
        (whole / "bundle").mkdir(parents=True)
        (whole / "checkpoint").mkdir()
        write_bundle(whole / "bundle", whole / "checkpoint")
        self._outside = folder / "outside"
        self._outside.write_bytes(bytes(24))
        self.placed = Placed(folder / "manifest", files_below(whole))

    def edit(self, files: Files, random: Random) -> None:
        """Change the manifest, and seldom which files there are."""
        name = f"bundle/{MANIFEST}"
        content = files.get(name)
        if isinstance(content, bytes) and random.randrange(5):
            files[name] = edited_json(content, random)
        elif files:
            odd_entry(files, random, str(self._outside))

    def read(self) -> tuple[Bundle, WeightIndex]:
        """Open the bundle, and its index."""
        bundle = open_bundle(self.folder / "bundle")
        return bundle, bundle.index()

    def hold(self, said: tuple[Bundle, WeightIndex]) -> None:
        """See that its manifest is of the types it says, and names nothing elsewhere."""
        bundle, index = said
        manifest = bundle.manifest
        assert (
            Manifest.from_dict(json.loads(json.dumps(manifest.to_dict())), source=bundle.folder)
            == manifest
        )
        assert isinstance(manifest.config, GrokConfig)
        assert manifest.dtype in DTYPES
        assert manifest.head == ("float32" if manifest.head_error is None else "int8")
        if manifest.head_error is not None:
            assert all(map(math.isfinite, dataclasses.astuple(manifest.head_error)))
        assert (manifest.kind == "engine") == isinstance(manifest.backend, str)
        for table in (manifest.source, manifest.versions):
            assert all(type(text) is str for text in table.values())
        for file in (*manifest.files, *manifest.weight_files, *index.files):
            assert not Path(file).is_absolute()
            assert ".." not in Path(file).parts
        for counts in manifest.lowering.values():
            assert type(counts["lowered"]) is type(counts["function"]) is int
        for file, record in manifest.files.items():
            assert fingerprint(bundle.folder / file) == record.fingerprint


def write_bundle(
    folder: Path, weights: Path, config: GrokConfig = SMALL, absolute: str = ""
) -> None:
    """Write a bundle of two made-up graphs that points at one file of weights.

    Args:
        folder: of the bundle, beside that of the weights, `checkpoint`; both are there.
        weights: folder of the weights.
        config: of the manifest.
        absolute: where the manifest says that the weights were.
    """
    (weights / "w").write_bytes(bytes(24))
    WeightIndex(
        root=weights,
        weights={"w": Weight(name="w", file="w", offset=0, dtype="float32", shape=(6,))},
        files={"w": 24},
    ).write(folder / WEIGHT_INDEX)
    for name in ("head.onnx", "head.ort.onnx", HEAD_WEIGHTS):
        (folder / name).write_bytes(b"graph")
    files = ("head.onnx", "head.ort.onnx", HEAD_WEIGHTS, WEIGHT_INDEX)
    manifest = Manifest(
        kind="engine",
        backend="ort",
        config=config,
        dtype="float32",
        head="int8",
        head_error=HeadError(relative=0.005, largest=0.01),
        weights=WeightsPlace(copied=False, relative="../checkpoint", absolute=absolute),
        source={"w": fingerprint(weights / "w")},
        versions={"onnx": "1"},
        files={name: record_of(folder / name) for name in files},
        weight_files={"w": record_of(weights / "w")},
        ports={"head": [{"name": "h", "shape": ["B", 6]}]},
        lowering={"GrokInt8Linear": {"lowered": 3, "function": 0}},
    )
    write_manifest(folder, manifest)


class IndexTarget(Target):
    """A weight index, and the files that it says tensors lie in."""

    name = "index"
    inputs: ClassVar[int] = 2500

    def __init__(self, folder: Path) -> None:
        whole = folder / "whole"
        (whole / "weights").mkdir(parents=True)
        for name, length in (("a", 100), ("b", 4096)):
            (whole / "weights" / name).write_bytes(bytes(length))
        places = (
            Weight(name="w", file="weights/a", offset=4, dtype="float32", shape=(3, 8)),
            Weight(
                name="x.weight", file="weights/b", offset=0, dtype="int8", shape=(32, 64), groups=4
            ),
            Weight(
                name="x.scales", file="weights/b", offset=2048, dtype="bfloat16", shape=(4, 64)
            ),
        )
        index = WeightIndex(
            root=whole,
            weights={weight.name: weight for weight in places},
            files={"weights/a": 100, "weights/b": 4096},
        )
        index.write(whole / WEIGHT_INDEX)
        self._outside = folder / "outside"
        self._outside.write_bytes(bytes(100))
        self.placed = Placed(folder / "index", files_below(whole))

    def edit(self, files: Files, random: Random) -> None:
        """Change the index, and seldom the files."""
        content = files.get(WEIGHT_INDEX)
        if isinstance(content, bytes) and random.randrange(5):
            files[WEIGHT_INDEX] = edited_json(content, random)
        elif files:
            odd_entry(files, random, str(self._outside))

    def read(self) -> WeightIndex:
        """Read the index, and every tensor in it."""
        index = WeightIndex.read(self.folder / WEIGHT_INDEX, root=self.folder)
        reader = WeightReader(self.folder)
        for weight in index:
            array = reader.read(weight)
            assert array.shape == weight.shape
            assert array.nbytes == weight.nbytes
            array.reshape(-1)[-1:].tobytes()  # its last byte can be read
        return index

    def hold(self, said: WeightIndex) -> None:
        """See that all tensors lie in the files."""
        for weight in said:
            assert not Path(weight.file).is_absolute()
            assert ".." not in Path(weight.file).parts
            assert weight.offset + weight.nbytes <= said.files[weight.file]
