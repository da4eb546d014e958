"""The sha256 hashes that are known of weights: of whole files from a list, of tensors in a store.

A list is what `sha256sum` prints, or the `store.json` of a store, which has hashes of the files
that it was made from.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from export_grok.errors import ConfigError
from export_grok.export.safetensors_header import MAX_HEADER_BYTES
from export_grok.export.store.folder import STORE_MANIFEST
from export_grok.export.store.manifest import StoreManifest
from export_grok.regular_file import open_regular, read_regular

__all__ = ["HashList", "tensor_hashes"]

# <hash> <space or, for binary, *><path>; a backslash before it says that the path is escaped.
_PLAIN = re.compile(r"(?P<escaped>\\?)(?P<hash>[0-9a-fA-F]{64}) [ *](?P<path>.+)")
_TAGGED = re.compile(r"(?P<escaped>\\?)SHA256 \((?P<path>.+)\) = (?P<hash>[0-9a-fA-F]{64})")
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}

_SHA256 = re.compile("[0-9a-f]{64}")

# A message with hundreds of lines helps nobody.
MAX_PRINTED = 5


@dataclass(frozen=True, kw_only=True)
class HashList:
    """Hashes of whole files.

    Attributes:
        source: where they were read.
        hashes: sha256 in hexadecimal, by path as it stands in the list.
    """

    source: Path
    hashes: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "HashList":
        """Return the list in `path`.

        Raises:
            CheckpointError: it is a `store.json`, and damaged.
            ConfigError: it cannot be read, has lines that are none of a list, or two hashes for a
                file.
        """
        if path.name == STORE_MANIFEST and (manifest := StoreManifest.read(path.parent)):
            hashes = {name: file.sha256 for name, file in manifest.source.items()}
            return cls(source=path, hashes=hashes)
        try:
            text = read_regular(path).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a list of hashes: {error}") from error
        hashes, faults = _parsed(text)
        if faults:
            shown = faults[:MAX_PRINTED]
            if len(faults) > len(shown):
                shown.append(f"... and {len(faults) - len(shown)} more")
            raise ConfigError(
                "\n  ".join(
                    [f"{path} is no list of sha256 hashes as sha256sum prints it:", *shown]
                )
            )
        return cls(source=path, hashes=hashes)

    def match(self, files: Iterable[str]) -> dict[str, str]:
        """Return which path of the list each of `files` has; some may have none.

        A file is meant by a path that is its own, or the end of its own, or ends with it:
        `ckpt-0/tensor00000_000` by `tensor00000_000` and by `/data/grok-1/ckpt-0/tensor00000_000`.

        Raises:
            ConfigError: paths with other hashes mean the same file.
        """
        by_name: dict[str, list[str]] = {}
        for listed in self.hashes:
            by_name.setdefault(PurePosixPath(listed).name, []).append(listed)
        found = {}
        for file in files:
            same = [p for p in by_name.get(PurePosixPath(file).name, ()) if _means(p, file)]
            exact = [path for path in same if _parts(path) == _parts(file)]
            same = exact or same
            if len({self.hashes[path] for path in same}) > 1:
                raise ConfigError(
                    f"{self.source} has other hashes for {file} as {' and as '.join(same)}; "
                    "give a list of one checkpoint"
                )
            if same:
                found[file] = same[0]
        return found


def tensor_hashes(path: Path) -> dict[str, str]:
    """Return the hashes of the tensors that a file of a store names in its header, by name.

    They are what was written once; a file by another program has none.
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            texts = json.loads(file.read(min(length, MAX_HEADER_BYTES)))["__metadata__"]
        return {
            name.removeprefix("sha256:"): text
            for name, text in texts.items()
            if name.startswith("sha256:") and _SHA256.fullmatch(text)
        }
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):
        return {}


def _parsed(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the hashes in a list, and what is wrong with its lines."""
    hashes: dict[str, str] = {}
    faults = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith("#"):
            continue
        found = _PLAIN.fullmatch(line) or _TAGGED.fullmatch(line)
        if not found:
            faults.append(f"line {number} is no hash and path: {line[:90]!r}")
            continue
        name = _unescaped(found["path"]) if found["escaped"] else found["path"]
        sha256 = found["hash"].lower()
        if hashes.setdefault(name, sha256) != sha256:
            faults.append(f"line {number} has another hash of {name} than a line before")
    return hashes, faults or ([] if hashes else ["it is empty"])


def _means(listed: str, file: str) -> bool:
    long, short = sorted((_parts(listed), _parts(file)), key=len, reverse=True)
    return long[len(long) - len(short) :] == short


def _parts(path: str) -> tuple[str, ...]:
    pure = PurePosixPath(path)
    return pure.parts[1:] if pure.is_absolute() else pure.parts


def _unescaped(path: str) -> str:
    return re.sub(r"\\[\\nr]", lambda found: _ESCAPES[found[0]], path)
