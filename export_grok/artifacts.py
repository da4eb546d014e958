"""The folders that stages write and read: the names of their files, and how they are opened.

A folder of graphs, or a bundle (the same with an engine built from them), holds

    manifest.json               written last: a folder without it is unfinished and does not load
    weights.json                the weight index
    layer.template.onnx ...     one graph of each kind, weights as inputs, no data
    layer_00.onnx ...           stamped: initialisers point at the bytes of the weights
    layer_00.ort.onnx ...       a bundle only: lowered for its backend
    head.weights                if the head is int8: all weights of its graphs, and no others
    weights/                    if the weights were copied: a store, see `export.store.folder`
    ranks/layer_00.0.onnx ...   if ranks share the model: the parts of each graph, for all of them
    rank_0/ ...                 and the weights of each, see `export.rank_weights`
    tokenizer.model             if the checkpoint had one
"""

import os
from dataclasses import dataclass
from pathlib import Path

from export_grok.config import GrokConfig
from export_grok.errors import BundleError
from export_grok.files import fingerprint, read_json, write_json
from export_grok.manifest import FileRecord, Kind, Manifest
from export_grok.weights import WeightIndex

__all__ = [
    "COPIED_WEIGHTS",
    "HEAD_WEIGHTS",
    "MANIFEST",
    "RANK_GRAPHS",
    "TOKENIZER",
    "WEIGHT_INDEX",
    "Bundle",
    "graph_file",
    "open_bundle",
    "rank_folder",
    "read_bundle",
    "record_of",
    "write_manifest",
]

MANIFEST = "manifest.json"
WEIGHT_INDEX = "weights.json"
TOKENIZER = "tokenizer.model"
COPIED_WEIGHTS = "weights"
HEAD_WEIGHTS = "head.weights"
RANK_GRAPHS = "ranks"


def graph_file(kind: str, layer: int | None = None, *, variant: str = "") -> str:
    """Return the name of a graph's file.

    Args:
        kind: of the graph.
        layer: number of the layer, for a stamped layer.
        variant: "template", or the backend it was lowered for; empty for a stamped graph.
    """
    stem = kind if layer is None else f"{kind}_{layer:02}"
    return f"{stem}.{variant}.onnx" if variant else f"{stem}.onnx"


def rank_folder(rank: int) -> str:
    """Return the name of the folder with a rank's weights."""
    return f"rank_{rank}"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A folder whose manifest was read.

    Attributes:
        folder: of the graphs.
        weights_root: folder that the graphs' initialisers, and the index, start from. The graphs
            of the head have a root of their own, `head_root`.
    """

    folder: Path
    weights_root: Path
    manifest: Manifest

    @property
    def config(self) -> GrokConfig:
        """Hyper-parameters of the model."""
        return self.manifest.config

    @property
    def sizes(self) -> dict[str, int]:
        """What the engine was built for, as `batch` and `max_length`; empty if for any."""
        sizes: dict[str, int] = self.manifest.engine.get("sizes", {})
        return sizes

    @property
    def head_root(self) -> Path:
        """Folder that the initialisers of the graphs `head` and `head_all` start from."""
        return self.folder if self.manifest.head == "int8" else self.weights_root

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's file, if there is one."""
        return self.folder / TOKENIZER if TOKENIZER in self.manifest.files else None

    def index(self) -> WeightIndex:
        """Return the weight index.

        Raises:
            BundleError: its file is damaged.
        """
        return WeightIndex.read(self.folder / WEIGHT_INDEX, root=self.weights_root)

    def faults(self) -> list[str]:
        """Return which files are missing or differ from the manifest, a line for each."""
        faults = _faults(self.folder, self.manifest.files)
        weight_faults = _faults(self.weights_root, self.manifest.weight_files)
        if weight_faults and not self.manifest.weights.copied:
            weight_faults.append(
                f"the bundle points at the weights in {self.weights_root}; "
                "if they were moved, say where to with --weights-root"
            )
        return [*faults, *weight_faults]


def record_of(path: Path) -> FileRecord:
    """Return length and fingerprint of a file.

    Raises:
        OSError: it cannot be read.
    """
    return FileRecord(bytes=path.stat().st_size, fingerprint=fingerprint(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest: from here on the folder counts as whole.

    Raises:
        OutputError: it cannot be written.
    """
    write_json(folder / MANIFEST, manifest.to_dict())


def open_bundle(
    folder: Path, *, kind: Kind | None = None, weights_root: Path | None = None
) -> Bundle:
    """Return the folder's content, after holding every file to the manifest.

    Args:
        folder: of graphs, or a bundle.
        kind: what it must be; None for either.
        weights_root: where the weights are now, if neither the way from the bundle nor the old
            place leads to them.

    Raises:
        BundleError: it is unfinished, of another kind, or files are missing or differ; all are
            named.
    """
    bundle = read_bundle(folder, kind=kind, weights_root=weights_root)
    if faults := bundle.faults():
        raise BundleError("\n  ".join([f"{folder} cannot be used:", *faults]))
    return bundle


def read_bundle(
    folder: Path, *, kind: Kind | None = None, weights_root: Path | None = None
) -> Bundle:
    """Return what the manifest of `folder` says, without a look at the other files.

    The arguments are those of `open_bundle`.

    Raises:
        BundleError: it is unfinished, or of another kind.
    """
    if not folder.is_dir():
        raise BundleError(f"{folder} is no folder; give the --out folder of build-engine")
    if not (folder / MANIFEST).exists():
        raise BundleError(
            f"{folder} has no {MANIFEST}: it is no bundle, or its making was broken off; "
            "run build-engine (again)"
        )
    manifest = Manifest.from_dict(read_json(folder / MANIFEST), source=folder / MANIFEST)
    if kind == "engine" and manifest.kind != "engine":
        text = f"{folder} holds graphs and no engine; build one: export-grok build-engine {folder}"
        if manifest.dtype != "float32":
            text += (
                " --backend trt (or trt-rtx); for a CPU, where nothing computes in "
                f"{manifest.dtype}, export with --dtype float32"
            )
        raise BundleError(text)
    root = _weights_root(folder, manifest, weights_root)
    return Bundle(folder=folder, weights_root=root, manifest=manifest)


def _weights_root(folder: Path, manifest: Manifest, given: Path | None) -> Path:
    place = manifest.weights
    if place.copied:
        return folder
    beside = Path(os.path.normpath(folder.resolve() / place.relative))
    candidates = [given] if given else [beside, Path(place.absolute)]
    files = list(manifest.weight_files)
    for candidate in candidates:
        # A name from a damaged manifest may be longer than any file has: os.path says no then.
        if all(os.path.exists(candidate / file) for file in files):
            return candidate
    return candidates[0]


def _faults(root: Path, files: dict[str, FileRecord]) -> list[str]:
    faults = []
    for name, wanted in files.items():
        path = root / name
        try:
            length = path.stat().st_size
            if length != wanted.bytes:
                faults.append(f"{path} has {length} bytes, not {wanted.bytes}")
            elif fingerprint(path) != wanted.fingerprint:
                faults.append(f"{path} has changed since the bundle was made")
        except OSError as error:
            faults.append(f"{path}: {error.strerror}")
        except ValueError as error:  # half of a surrogate pair, which is in no file's name
            faults.append(f"{str(path)!r}: {error}")
    return faults
