"""The folders that stages write and read: names of files, and the manifest that makes them whole.

A folder of graphs, or a bundle (the same with an engine built from them), holds

    manifest.json               written last: a folder without it is unfinished and does not load
    weights.json                the weight index
    layer.template.onnx ...     one graph of each kind, weights as inputs, no data
    layer_00.onnx ...           stamped: initialisers point at the bytes of the weights
    layer_00.ort.onnx ...       a bundle only: lowered for its backend
    weights/                    if the weights were copied: a store, see `export.store`
    tokenizer.model             if the checkpoint had one
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from export_grok.config import DTYPES, Dtype, GrokConfig
from export_grok.errors import BundleError, ConfigError
from export_grok.files import fingerprint, read_json, write_json
from export_grok.weights import WeightIndex

__all__ = [
    "COPIED_WEIGHTS",
    "MANIFEST",
    "TOKENIZER",
    "WEIGHT_INDEX",
    "Bundle",
    "FileRecord",
    "Manifest",
    "WeightsPlace",
    "graph_file",
    "open_bundle",
    "record_of",
    "write_manifest",
]

FORMAT = "export-grok bundle"
FORMAT_VERSION = 1

MANIFEST = "manifest.json"
WEIGHT_INDEX = "weights.json"
TOKENIZER = "tokenizer.model"
COPIED_WEIGHTS = "weights"

Kind = Literal["graphs", "engine"]


def graph_file(kind: str, layer: int | None = None, *, variant: str = "") -> str:
    """Return the name of a graph's file.

    Args:
        kind: of the graph.
        layer: number of the layer, for a stamped layer.
        variant: "template", or the backend it was lowered for; empty for a stamped graph.
    """
    stem = kind if layer is None else f"{kind}_{layer:02}"
    return f"{stem}.{variant}.onnx" if variant else f"{stem}.onnx"


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file must be: its length, and the fingerprint of its content."""

    bytes: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class WeightsPlace:
    """Where the weights of a bundle lie.

    Attributes:
        copied: whether they lie in the bundle.
        relative: their folder as a path from the bundle; both may be moved together.
        absolute: their folder when the bundle was made, empty when they were copied.
    """

    copied: bool
    relative: str
    absolute: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds, and what it was made of and by.

    Attributes:
        kind: "graphs", or "engine" for a bundle that runs.
        backend: which engine; None for graphs.
        config: of the model, its number of layers that of the graphs.
        dtype: of activations and cache.
        source: fingerprint of every source file that went in, by path.
        versions: of the packages that made it.
        files: graphs, index and tokenizer, by name.
        weight_files: by path below the weights' folder.
        ports: the I/O table: graph kind -> rows of name, direction, shape, dtype, aliases.
        lowering: op type -> how many nodes run natively, and how many by function body.
    """

    kind: Kind
    backend: str | None
    config: GrokConfig
    dtype: Dtype
    weights: WeightsPlace
    source: dict[str, str]
    versions: dict[str, str]
    files: dict[str, FileRecord]
    weight_files: dict[str, FileRecord]
    ports: dict[str, list[dict[str, Any]]]
    lowering: dict[str, dict[str, int]]

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        header = {"format": FORMAT, "format_version": FORMAT_VERSION}
        return header | dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any], *, source: Path) -> "Manifest":
        """Return the manifest that JSON values describe.

        Raises:
            BundleError: it is of another format or version, or damaged.
        """
        if value.get("format") != FORMAT:
            raise BundleError(f"{source} is not a manifest of export-grok")
        if value.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"{source} has format version {value.get('format_version')}; "
                f"this program reads {FORMAT_VERSION}: build the bundle again"
            )
        faults: list[str] = []
        parts: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            try:
                parts[field.name] = _PARTS[field.name](value[field.name])
            except KeyError:
                faults.append(f"{field.name} is missing")
            except (ConfigError, TypeError, ValueError) as error:
                faults.append(f"{field.name}: {error}")
        if not faults and (parts["kind"] == "engine") != (parts["backend"] is not None):
            faults.append(f"kind is {parts['kind']}, backend {parts['backend']}")
        if faults:
            raise BundleError(f"{source} is damaged ({'; '.join(faults)}): build the bundle again")
        return cls(**parts)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A folder whose manifest was read and whose files were checked.

    Attributes:
        folder: of the graphs.
        weights_root: folder that the graphs' initialisers, and the index, start from.
    """

    folder: Path
    weights_root: Path
    manifest: Manifest

    @property
    def config(self) -> GrokConfig:
        """Hyper-parameters of the model."""
        return self.manifest.config

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
    if not folder.is_dir():
        raise BundleError(f"{folder} is no folder; give the --out folder of build-engine")
    if not (folder / MANIFEST).exists():
        raise BundleError(
            f"{folder} has no {MANIFEST}: it is no bundle, or its making was broken off; "
            "run build-engine (again)"
        )
    manifest = Manifest.from_dict(read_json(folder / MANIFEST), source=folder / MANIFEST)
    if kind == "engine" and manifest.kind != "engine":
        raise BundleError(
            f"{folder} holds graphs and no engine; build one: export-grok build-engine {folder}"
        )
    root = _weights_root(folder, manifest, weights_root)
    faults = _faults(folder, manifest.files)
    weight_faults = _faults(root, manifest.weight_files)
    if weight_faults and not manifest.weights.copied:
        weight_faults.append(
            f"the bundle points at the weights in {root}; "
            "if they were moved, say where to with --weights-root"
        )
    if faults or weight_faults:
        raise BundleError("\n  ".join([f"{folder} cannot be used:", *faults, *weight_faults]))
    return Bundle(folder=folder, weights_root=root, manifest=manifest)


def _weights_root(folder: Path, manifest: Manifest, given: Path | None) -> Path:
    place = manifest.weights
    if place.copied:
        return folder
    beside = Path(os.path.normpath(folder / place.relative))
    candidates = [given] if given else [beside, Path(place.absolute)]
    files = list(manifest.weight_files)
    for candidate in candidates:
        if all((candidate / file).exists() for file in files):
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


def _one_of(*allowed: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{value!r} is none of {', '.join(allowed)}")
        return value

    return read


def _name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{value!r} is no name")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no object")
    return value


def _table_of(kind: type) -> Callable[[Any], dict[str, Any]]:
    def read(value: Any) -> dict[str, Any]:
        for name, entry in _object(value).items():
            if type(entry) is not kind:
                raise ValueError(f"{name} is {entry!r}, no {kind.__name__}")
        return _object(value)

    return read


def _config(value: Any) -> GrokConfig:
    return GrokConfig.from_dict(_object(value), source="of the model")


def _place(value: Any) -> WeightsPlace:
    place = WeightsPlace(**_object(value))
    if type(place.copied) is not bool:
        raise ValueError(f"copied is {place.copied!r}, no bool")
    for path in (place.relative, place.absolute):
        if not isinstance(path, str) or "\0" in path:
            raise ValueError(f"{path!r} is no path")
    return place


def _records(value: Any) -> dict[str, FileRecord]:
    for name in _object(value):
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise ValueError(f"{name!r} is outside the folder")
    return {name: FileRecord(**_object(record)) for name, record in value.items()}


def _lowering(value: Any) -> dict[str, dict[str, int]]:
    for op, counts in _object(value).items():
        if _table_of(int)(counts).keys() != {"native", "function"}:
            raise ValueError(f"{op} has counts of {', '.join(counts) or 'nothing'}")
    return _object(value)


# How each field of a manifest is read from JSON.
_PARTS: dict[str, Callable[[Any], Any]] = {
    "kind": _one_of(*get_args(Kind)),
    "backend": _name,
    "config": _config,
    "dtype": _one_of(*DTYPES),
    "weights": _place,
    "source": _table_of(str),
    "versions": _table_of(str),
    "files": _records,
    "weight_files": _records,
    "ports": _table_of(list),
    "lowering": _lowering,
}
