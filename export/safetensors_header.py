"""The header of a safetensors file: which tensors lie where, without reading their bytes."""

import json
import os
from pathlib import Path
from typing import Any

from export_grok.errors import CheckpointError
from export_grok.regular_file import open_regular
from export_grok.weights import StoredDtype, Weight

__all__ = ["CODES", "read_store_header"]

# So much of a header the safetensors package reads too.
MAX_HEADER_BYTES = 100_000_000

# What the format calls our dtypes.
CODES: dict[StoredDtype, str] = {
    "int8": "I8",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}


def read_store_header(path: Path) -> dict[str, Weight]:
    """Return the tensors in the safetensors file `path` by name, without reading their bytes.

    Raises:
        CheckpointError: the file cannot be read, or its header is not that of a whole file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path} has {size} bytes and a header of {length} bytes: it is cut or no "
                    "safetensors file; write it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("no table of tensors")
        header.pop("__metadata__", None)
        places = {
            name: _placed(path.name, name, entry, start=8 + length)
            for name, entry in header.items()
        }
        _check_cover(places, start=8 + length, end=size)
    except (CheckpointError, RecursionError, ValueError) as error:
        raise CheckpointError(
            f"{path} has a damaged header ({error}); write the file again"
        ) from error
    return places


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _placed(file: str, name: str, entry: Any, *, start: int) -> Weight:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            if code not in _DTYPES:
                raise ValueError(f"{name} has dtype {code}; known are {', '.join(_DTYPES)}")
            weight = Weight(
                name=name,
                file=file,
                offset=start + begin,
                dtype=_DTYPES[code],
                shape=tuple(shape),
            )
            if begin < 0 or end - begin != weight.nbytes:
                raise ValueError(f"{name} has a length that is not that of its shape")
            return weight
    raise ValueError(f"{name} has no dtype, shape and data_offsets")


def _check_cover(places: dict[str, Weight], *, start: int, end: int) -> None:
    """Check that the tensors lie one after the other, without a gap, from `start` to `end`."""
    for weight in sorted(places.values(), key=lambda weight: (weight.offset, weight.nbytes)):
        if weight.offset != start:
            raise ValueError(f"{weight.name} overlaps another tensor, or leaves a gap")
        start += weight.nbytes
    if start != end:
        raise ValueError(f"the tensors end at byte {start}, the file at {end}")
