"""The manifest of a folder of graphs or of a bundle: what it holds, what it was made of and by."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from export_grok.config import DTYPES, HEAD_DTYPES, Dtype, GrokConfig, HeadDtype
from export_grok.errors import BundleError, ConfigError

__all__ = ["FileRecord", "HeadError", "Kind", "Manifest", "WeightsPlace"]

FORMAT = "export-grok bundle"
FORMAT_VERSION = 1

Kind = Literal["graphs", "engine"]


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
class HeadError:
    """What int8 did to the head: |float32 - int8| / |float32| of its matrix, as norms.

    Attributes:
        relative: of the whole matrix.
        largest: of the entry of the vocabulary where it is largest.
    """

    relative: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds, and what it was made of and by.

    Attributes:
        kind: "graphs", or "engine" for a bundle that runs.
        backend: which engine; None for graphs.
        config: of the model, its number of layers that of the graphs.
        dtype: of activations and cache.
        head: matrix of the head. A manifest from before there was a choice says nothing: float32.
        head_error: what int8 did to it; None for a float32 head.
        source: fingerprint of every source file that went in, by path.
        versions: of the packages that made it.
        files: graphs, index, tokenizer and the weights of an int8 head, by name.
        weight_files: by path below the weights' folder.
        ports: the I/O table: graph kind -> rows of name, direction, shape, dtype, aliases.
        lowering: op type -> how many nodes were lowered, and how many run by function body.
        engine: what the backend says of its engine, in its own form; empty if it says nothing.
    """

    kind: Kind
    backend: str | None
    config: GrokConfig
    dtype: Dtype
    head: HeadDtype = "float32"
    head_error: HeadError | None = None
    weights: WeightsPlace
    source: dict[str, str]
    versions: dict[str, str]
    files: dict[str, FileRecord]
    weight_files: dict[str, FileRecord]
    ports: dict[str, list[dict[str, Any]]]
    lowering: dict[str, dict[str, int]]
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)

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
            if field.name not in value and field.name in _LATER:
                continue
            try:
                parts[field.name] = _PARTS[field.name](value[field.name])
            except KeyError:
                faults.append(f"{field.name} is missing")
            except (ConfigError, TypeError, ValueError) as error:
                faults.append(f"{field.name}: {error}")
        if not faults and (parts["kind"] == "engine") != (parts["backend"] is not None):
            faults.append(f"kind is {parts['kind']}, backend {parts['backend']}")
        head, off = parts.get("head", "float32"), parts.get("head_error")
        if not faults and (head == "int8") != (off is not None):
            faults.append(f"head is {head}, head_error {off}")
        if faults:
            raise BundleError(f"{source} is damaged ({'; '.join(faults)}): build the bundle again")
        return cls(**parts)


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


def _head_error(value: Any) -> HeadError | None:
    if value is None:
        return None
    for name, number in _object(value).items():
        if type(number) is not float or not 0 <= number < math.inf:
            raise ValueError(f"{name} is {number!r}, no finite float from 0")
    return HeadError(**value)


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
        if _table_of(int)(counts).keys() != {"lowered", "function"}:
            raise ValueError(f"{op} has counts of {', '.join(counts) or 'nothing'}")
    return _object(value)


# Fields that a manifest from before there was a choice does not have.
_LATER = {"head", "head_error", "engine"}

# How each field of a manifest is read from JSON.
_PARTS: dict[str, Callable[[Any], Any]] = {
    "kind": _one_of(*get_args(Kind)),
    "backend": _name,
    "config": _config,
    "dtype": _one_of(*DTYPES),
    "head": _one_of(*HEAD_DTYPES),
    "head_error": _head_error,
    "weights": _place,
    "source": _table_of(str),
    "versions": _table_of(str),
    "files": _records,
    "weight_files": _records,
    "ports": _table_of(list),
    "lowering": _lowering,
    "engine": _object,
}
