"""A reader of GGUF files for tests, written from the format's description."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["GgufFile", "Q8Tensor", "read_gguf"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
STRING, ARRAY = 8, 9
_FLOATS = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype(ml_dtypes.bfloat16)}
Q8_0 = 8


@dataclass(frozen=True)
class Q8Tensor:
    """Codes [.., K], and the scale of every 32 of them, [.., K / 32]."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float16]


@dataclass(frozen=True)
class GgufFile:
    """What a file says, and its tensors: arrays, outermost axis first, or `Q8Tensor`."""

    keys: dict[str, Any]
    tensors: dict[str, Any]


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def string(self) -> str:
        (length,) = self.take("Q")
        (text,) = self.take(f"{length}s")
        return str(text, "utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.take("IQ")
            return [self.value(inner) for _ in range(count)]
        return self.take(_SCALARS[kind])[0]


def read_gguf(path: Path) -> GgufFile:
    """Return what a file holds; it must end where its last tensor, filled up, does."""
    file = _Bytes(path.read_bytes())
    assert file.take("4sI") == (b"GGUF", 3)
    tensors, keys = file.take("QQ")
    table = {}
    for _ in range(keys):
        name = file.string()
        table[name] = file.value(*file.take("I"))
    assert len(table) == keys
    places = []
    for _ in range(tensors):
        name = file.string()
        shape = file.take(f"{file.take('I')[0]}Q")[::-1]
        places.append((name, shape, *file.take("IQ")))
    start, end = -(-file.at // 32) * 32, 0
    found = {}
    for name, shape, kind, offset in places:
        assert offset == end, name
        found[name], length = _tensor(file.data, start + offset, shape, kind)
        end = -(-(offset + length) // 32) * 32
    assert len(file.data) == start + end
    return GgufFile(table, found)


def _tensor(
    data: bytes, start: int, shape: tuple[int, ...], kind: int
) -> tuple[NDArray[Any] | Q8Tensor, int]:
    count = int(np.prod(shape))
    if kind != Q8_0:
        dtype = _FLOATS[kind]
        return np.frombuffer(data, dtype, count, start).reshape(shape), count * dtype.itemsize
    blocks = np.frombuffer(data, [("d", "<f2"), ("qs", "i1", 32)], count // 32, start)
    blocks = blocks.reshape(*shape[:-1], shape[-1] // 32)
    return Q8Tensor(blocks["qs"].reshape(shape), blocks["d"]), count // 32 * 34
