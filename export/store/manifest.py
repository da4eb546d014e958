"""`store.json`: what an imported store holds, what it was made from, and the hashes of both."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_grok.config import GrokConfig
from export_grok.errors import BundleError, CheckpointError, ConfigError
from export_grok.export.parameters import model_parameters
from export_grok.export.quantisation import QuantisedTensor
from export_grok.export.store.file import FORMAT
from export_grok.export.store.folder import STORE_MANIFEST, store_files, store_plan
from export_grok.export.tensor_source import TensorSource
from export_grok.files import read_json, write_json
from export_grok.weights import Weight

__all__ = ["SourceFile", "StoreManifest", "StoredTensor"]

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a store.

    Attributes:
        file: of the store that it lies in.
        dtype: of the stored bytes.
        shape: of the tensor.
        sha256: of its bytes.
        origins: paths of the source files that it was made from.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    origins: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that tensors were made from: its length, and the sha256 of all of it."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """What an import has written.

    Attributes:
        layout: of the source: "released", "store", or the name of a foreign layout.
        plan: id of the import; the headers of the store's files name it too.
        config: of the model.
        files: length in bytes of each file of the store, by name.
        tensors: by name.
        source: the files that they were made from, by path below the source's folder.
        errors: what quantising did to a matrix, by the name of its weight; empty if the source
            was int8 already.
    """

    layout: str
    plan: str
    config: GrokConfig
    files: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]
    source: Mapping[str, SourceFile]
    errors: Mapping[str, QuantisedTensor]

    @classmethod
    def of(cls, source: TensorSource, plan: str, out: Path) -> "StoreManifest":
        """Return the manifest of a store that was written, from what its files' headers say.

        Args:
            source: that it was made from.
            plan: id of the import.
            out: folder of the store.

        Raises:
            CheckpointError: a file is not there any more, or another.
        """
        files: dict[str, int] = {}
        tensors: dict[str, StoredTensor] = {}
        made_from: dict[str, SourceFile] = {}
        errors: dict[str, QuantisedTensor] = {}
        for file in store_plan(source, plan):
            facts = file.facts_in(out / file.name)
            if facts is None:
                raise CheckpointError(
                    f"{out / file.name} was changed while the store was written; import it again"
                )
            files[file.name] = file.size
            for name, weight in file.weights.items():
                tensors[name] = StoredTensor(
                    file=file.name,
                    dtype=weight.dtype,
                    shape=weight.shape,
                    sha256=facts.tensors[name],
                    origins=source.origins(name),
                )
            for path, length in file.source.items():
                made_from[path] = SourceFile(bytes=length, sha256=facts.source[path])
            errors |= {name: _error(json.loads(text)) for name, text in facts.errors.items()}
        return cls(
            layout=source.layout,
            plan=plan,
            config=source.config,
            files=files,
            tensors={name: tensors[name] for name in model_parameters(source.config)},
            source=dict(sorted(made_from.items())),
            errors=errors,
        )

    def write(self, folder: Path) -> None:
        """Write the manifest: from here on the store counts as whole.

        Raises:
            OutputError: it cannot be written.
        """
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("tensors", "source", "errors"):
            parts[name] = {key: dataclasses.asdict(each) for key, each in parts[name].items()}
        header = {"format": FORMAT, "format_version": FORMAT_VERSION}
        write_json(folder / STORE_MANIFEST, header | parts | {"config": self.config.to_dict()})

    @classmethod
    def read(cls, folder: Path) -> "StoreManifest | None":
        """Return the manifest of the store in `folder`; None if it has none.

        Raises:
            CheckpointError: it is damaged, or of another format or version.
        """
        path = folder / STORE_MANIFEST
        if not path.exists():
            return None
        advice = "import the weights again"
        try:
            value = read_json(path)
        except BundleError as error:
            raise CheckpointError(f"{error}; {advice}") from error
        if value.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not of a store of export-grok; {advice}")
        if value.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {value.get('format_version')}; this program reads "
                f"{FORMAT_VERSION}: {advice}"
            )
        try:
            manifest = cls(**{name: read(value[name]) for name, read in _PARTS.items()})
            manifest._check()
        except KeyError as error:
            raise CheckpointError(f"{path} is damaged ({error} is missing); {advice}") from error
        except (CheckpointError, ConfigError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); {advice}") from error
        return manifest

    def _check(self) -> None:
        """Hold the parts to each other."""
        if self.files.keys() != store_files(self.config).keys():
            raise ValueError("it names other files than a store of its config has")
        wanted = model_parameters(self.config)
        for name in wanted.keys() ^ self.tensors.keys():
            there = "is there, but none" if name in self.tensors else "is missing, one"
            raise ValueError(f"{name} {there} of the model's")
        for name, tensor in self.tensors.items():
            if (tensor.dtype, tensor.shape) != (wanted[name].dtype, wanted[name].shape):
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}")
            if tensor.file not in self.files:
                raise ValueError(f"{name} lies in {tensor.file}, which is no file of the store")
            for path in tensor.origins:
                if path not in self.source:
                    raise ValueError(f"{name} is made from {path}, which is no source file")
        for name in self.errors:
            if name not in self.tensors:
                raise ValueError(f"{name} has an error and is no tensor")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _sha256(value: Any) -> str:
    if not re.fullmatch("[0-9a-f]{64}", _text(value)):
        raise ValueError(f"{value!r} is no sha256")
    return _text(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no length")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no object")
    return value


def _tensor(name: str, value: Any) -> StoredTensor:
    shape, origins = value["shape"], value["origins"]
    if not isinstance(shape, list) or not isinstance(origins, list):
        raise ValueError(f"{name} has no list of lengths, or of files")
    # A weight knows what a path, a dtype and a shape can be.
    place = Weight(
        name=name, file=_text(value["file"]), offset=0, dtype=value["dtype"], shape=tuple(shape)
    )
    return StoredTensor(
        file=place.file,
        dtype=place.dtype,
        shape=place.shape,
        sha256=_sha256(value["sha256"]),
        origins=tuple(map(_text, origins)),
    )


def _error(value: Any) -> QuantisedTensor:
    numbers = {name: number for name, number in _table(value).items() if name != "name"}
    for name, number in numbers.items():
        known = number is None or (type(number) in (int, float) and math.isfinite(number))
        if not known:
            raise ValueError(f"{name} is {number!r}, no finite number")
    return QuantisedTensor(name=_text(value["name"]), **numbers)


# How each part of a manifest is read from JSON.
_PARTS: dict[str, Callable[[Any], Any]] = {
    "layout": _text,
    "plan": _text,
    "config": lambda value: GrokConfig.from_dict(_table(value), source="config"),
    "files": lambda value: {name: _count(length) for name, length in _table(value).items()},
    "tensors": lambda value: {n: _tensor(n, _table(each)) for n, each in _table(value).items()},
    "source": lambda value: {
        path: SourceFile(bytes=_count(each["bytes"]), sha256=_sha256(each["sha256"]))
        for path, each in _table(value).items()
    },
    "errors": lambda value: {name: _error(each) for name, each in _table(value).items()},
}
