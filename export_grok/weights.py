"""The weight index: where the bytes of every tensor lie. Nothing is copied to read them."""

import dataclasses
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from export_grok.errors import BundleError, CheckpointError
from export_grok.files import read_json, write_json
from export_grok.regular_file import open_regular

__all__ = ["NUMPY_DTYPES", "StoredDtype", "Weight", "WeightIndex", "WeightReader"]

StoredDtype = Literal["int8", "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]

NUMPY_DTYPES: dict[StoredDtype, np.dtype[Any]] = {
    "int8": np.dtype(np.int8),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    # of sources in other layouts alone
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Where one tensor lies.

    Attributes:
        name: its path in the model, e.g. `layers.3.experts.down.weight`.
        file: path below the root of the index, with `/`.
        offset: of its first byte in the file. Any; nothing is aligned in the released files.
        dtype: of the stored bytes, little endian, C order.
        groups: for an int8 matrix, how many groups of rows have scales of their own.

    Raises:
        CheckpointError: a value cannot be: an unknown dtype, a path out of the root, ...
    """

    name: str
    file: str
    offset: int
    dtype: StoredDtype
    shape: tuple[int, ...]
    groups: int | None = None

    def __post_init__(self) -> None:
        path = PurePosixPath(self.file)
        whole = all(_is_count(number) for number in (self.offset, *self.shape))
        if self.dtype not in get_args(StoredDtype):
            raise CheckpointError(
                f"{self.name} has dtype {self.dtype!r}; known are {', '.join(NUMPY_DTYPES)}"
            )
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise CheckpointError(
                f"{self.name} lies in {self.file!r}; a path below the index's folder is needed"
            )
        if not whole:
            raise CheckpointError(
                f"{self.name} has offset {self.offset!r} and shape {self.shape!r}; "
                "whole numbers from 0 are needed"
            )
        if self.groups is not None and not (_is_count(self.groups) and self.groups):
            raise CheckpointError(
                f"{self.name} has {self.groups!r} groups of rows; a whole number from 1 is needed"
            )

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.size * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def block(self, *index: int) -> "Weight":
        """Return the part at `index` of the leading axes, e.g. one expert: contiguous bytes."""
        shape, offset = self.shape, self.offset
        for i in index:
            length, *rest = shape
            shape = tuple(rest)
            offset += range(length)[i] * math.prod(shape) * NUMPY_DTYPES[self.dtype].itemsize
        name = f"{self.name}[{','.join(map(str, index))}]"
        return dataclasses.replace(self, name=name, shape=shape, offset=offset)


@dataclass(frozen=True, kw_only=True)
class WeightIndex:
    """All tensors of a model by name, and the files they lie in.

    Attributes:
        root: folder that the files' paths start from.
        weights: by name.
        files: length in bytes of every file, by path below `root`.
    """

    root: Path
    weights: dict[str, Weight]
    files: dict[str, int]

    def __getitem__(self, name: str) -> Weight:
        return self.weights[name]

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.weights.values())

    def below(self, prefix: str) -> dict[str, Weight]:
        """Return the tensors whose name starts with `prefix`, by the rest of their name."""
        return {
            name.removeprefix(prefix): weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }

    def write(self, path: Path) -> None:
        """Write the index as JSON. The root is not written: who reads it says where it is.

        Raises:
            OutputError: `path` cannot be written.
        """
        write_json(
            path,
            {
                "format": "export-grok weight index",
                "format_version": FORMAT_VERSION,
                "files": self.files,
                "weights": [dataclasses.asdict(weight) for weight in self],
            },
        )

    @classmethod
    def read(cls, path: Path, *, root: Path) -> "WeightIndex":
        """Return the index written in `path`, for files below `root`.

        Raises:
            BundleError: `path` is damaged, or of another version.
        """
        value = read_json(path)
        if value.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"{path} has format version {value.get('format_version')}; "
                f"this program reads {FORMAT_VERSION}: make it again"
            )
        try:
            weights = [
                Weight(**{**entry, "shape": tuple(entry["shape"])}) for entry in value["weights"]
            ]
            files = dict(value["files"])
            for name, length in files.items():
                if not _is_count(length):
                    raise ValueError(f"the length of {name} is {length!r}")
            for weight in weights:
                if type(weight.name) is not str:
                    raise ValueError(f"the name of a tensor is {weight.name!r}")
                if weight.offset + weight.nbytes > files[weight.file]:
                    raise BundleError(f"{path}: {weight.name} ends beyond {weight.file}")
        except (AttributeError, CheckpointError, KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{path} is damaged ({error}): make it again") from error
        return cls(root=root, weights={w.name: w for w in weights}, files=files)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # True is an int too, but not of this type


class WeightReader:
    """Reads tensors where they lie, by mapping their files into memory.

    A file is mapped at its first use and stays mapped as long as an array needs it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, weight: Weight) -> NDArray[Any]:
        """Return the tensor as a view of the file, read only, of the stored dtype.

        Raises:
            CheckpointError: the file is missing or too short.
        """
        if weight.file not in self._maps:
            path = self._root / weight.file
            try:
                with open_regular(path) as file:
                    self._maps[weight.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be mapped: {error}") from error
        mapped = self._maps[weight.file]
        if weight.offset + weight.nbytes > len(mapped):
            raise CheckpointError(
                f"{self._root / weight.file} has {len(mapped)} bytes; "
                f"{weight.name} ends at {weight.offset + weight.nbytes}: the file was cut"
            )
        flat = np.frombuffer(
            mapped, NUMPY_DTYPES[weight.dtype], count=weight.size, offset=weight.offset
        )
        return flat.reshape(weight.shape)
