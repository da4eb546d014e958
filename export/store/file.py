"""One file of a store as it is planned, and what its header says of the tensors behind it.

The texts in the header's `__metadata__`, which other readers of safetensors pass over:

    format          "export-grok store"
    config          hyper-parameters of the model, as JSON
    plan            id of the import that wrote the file; empty for a copy in a bundle
    sha256:NAME     of the bytes of a tensor
    source:PATH     length of a file that tensors are made from, and the sha256 of all of it
    error:NAME      what quantising did to a matrix, as JSON, if it was done on the way
"""

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from export_grok.config import GrokConfig
from export_grok.export.parameters import Parameter
from export_grok.export.safetensors_header import CODES
from export_grok.needs import room_of
from export_grok.regular_file import open_regular
from export_grok.weights import NUMPY_DTYPES, Weight

__all__ = ["FORMAT", "PAGE_BYTES", "Facts", "StoreFile"]

FORMAT = "export-grok store"
PAGE_BYTES = 4096

# Room for what quantising did to one matrix. It is known when the tensors behind it are written.
ERROR_BYTES = 1000

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a store's file once its tensors were read.

    Attributes:
        tensors: sha256 of the bytes of each, by name.
        source: sha256 of each file that they are made from, by path.
        errors: what quantising did to a matrix, as JSON, by the name of its weight.
    """

    tensors: Mapping[str, str]
    source: Mapping[str, str]
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StoreFile:
    """A file of a store that is written, or may have been written before.

    Attributes:
        name: of the file.
        parameters: that it holds, by name.
        config: of the model.
        plan: what the file is made by; one made by another is another file.
        source: length in bytes of each file that its tensors are made from, by path.
    """

    name: str
    parameters: Mapping[str, Parameter]
    config: GrokConfig
    plan: str
    source: Mapping[str, int]

    @cached_property
    def start(self) -> int:
        """Bytes of the header: whole pages, however long what it will say."""
        unknown = Facts(
            tensors=dict.fromkeys(self.parameters, "0" * 64),
            source=dict.fromkeys(self.source, "0" * 64),
            errors={
                name: "0" * ERROR_BYTES
                for name, parameter in self.parameters.items()
                if parameter.dtype == "int8"
            },
        )
        length = 8 + len(self._text(unknown))
        return length + -length % PAGE_BYTES

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Where its tensors lie, by name, in order.

        The largest come first: at full size their lengths are whole pages, so all begin at one.
        """
        return {
            parameter.name: Weight(
                name=parameter.name,
                file=self.name,
                offset=self.start + begin,
                dtype=parameter.dtype,
                shape=parameter.shape,
                groups=parameter.groups,
            )
            for parameter, begin in self._placed()
        }

    @property
    def nbytes(self) -> int:
        """Length of its tensors."""
        return sum(map(_nbytes, self.parameters.values()))

    @property
    def size(self) -> int:
        """Length of the whole file."""
        return self.start + self.nbytes

    def room(self, root: Path) -> int:
        """Return the bytes it will take of its disk: holes of the source's files stay holes.

        Args:
            root: folder of the source's files.

        Raises:
            OSError: they cannot be asked.
        """
        return min(self.size, self.start + sum(room_of(root / path) for path in self.source))

    def header(self, facts: Facts) -> bytes:
        """Return the first `start` bytes of the file."""
        text = self._text(facts)
        if 8 + len(text) > self.start:
            raise ValueError(f"{self.name} has a header of {len(text)} bytes, more than planned")
        return struct.pack("<Q", self.start - 8) + text.ljust(self.start - 8)

    def facts_in(self, path: Path) -> Facts | None:
        """Return what was known when `path` was written; None if it is not this file, whole."""
        try:
            with open_regular(path) as file:
                if os.fstat(file.fileno()).st_size != self.size:
                    return None
                header = file.read(self.start)
        except OSError:
            return None
        try:
            facts = _facts(json.loads(header[8:])["__metadata__"])
            return facts if self.header(facts) == header else None
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return None

    def _text(self, facts: Facts) -> bytes:
        entries: dict[str, Any] = {
            "__metadata__": {
                "format": FORMAT,
                "config": json.dumps(self.config.to_dict()),
                "plan": self.plan,
                **{f"sha256:{name}": facts.tensors[name] for name in self.parameters},
                **{
                    f"source:{path}": f"{length} {facts.source[path]}"
                    for path, length in self.source.items()
                },
                **{f"error:{name}": error for name, error in facts.errors.items()},
            }
        }
        for parameter, begin in self._placed():
            entries[parameter.name] = {
                "dtype": CODES[parameter.dtype],
                "shape": parameter.shape,
                "data_offsets": [begin, begin + _nbytes(parameter)],
            }
        return json.dumps(entries, separators=(",", ":")).encode()

    def _placed(self) -> Iterator[tuple[Parameter, int]]:
        """Yield the parameters in order, and where their bytes begin behind the header."""
        end = 0
        for parameter in sorted(self.parameters.values(), key=_nbytes, reverse=True):
            yield parameter, end
            end += _nbytes(parameter)


def _nbytes(parameter: Parameter) -> int:
    size = NUMPY_DTYPES[parameter.dtype].itemsize
    for length in parameter.shape:
        size *= length
    return size


def _facts(texts: Mapping[str, str]) -> Facts:
    """Return the facts in a header's texts.

    Raises:
        ValueError: a hash is none.
    """
    found: dict[str, dict[str, str]] = {"sha256": {}, "source": {}, "error": {}}
    for key, text in texts.items():
        kind, _, name = key.partition(":")
        if kind in ("sha256", "source"):
            text = text.rpartition(" ")[2]
            if not _SHA256.fullmatch(text):
                raise ValueError(f"{text} is no sha256")
        if kind in found:
            found[kind][name] = text
    return Facts(tensors=found["sha256"], source=found["source"], errors=found["error"])
