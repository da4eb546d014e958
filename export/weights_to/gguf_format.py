"""The GGUF format, version 3: a table of keys, a table of tensors, the bytes of the tensors.

Source: docs/gguf.md of ggml-org/ggml.
"""

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from export_grok.export.weights_to.plan import PlannedTensor, padded

__all__ = [
    "ALIGNMENT",
    "BLOCK",
    "array",
    "boolean",
    "float32",
    "header",
    "int32",
    "q8_0",
    "string",
    "tensor_nbytes",
    "uint16",
    "uint32",
]

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32

# Numbers of the types of values.
UINT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9
# Numbers of the types of tensors.
TENSOR_TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30}
# Q8_0 is blocks of so many codes along a row, each behind its scale in float16.
BLOCK = 32
_BYTES_OF_BLOCK = {"F32": 4 * BLOCK, "F16": 2 * BLOCK, "BF16": 2 * BLOCK, "Q8_0": 2 + BLOCK}


def uint16(value: int) -> bytes:
    """Return the value of a key."""
    return struct.pack("<IH", UINT16, value)


def uint32(value: int) -> bytes:
    """Return the value of a key."""
    return struct.pack("<II", UINT32, value)


def int32(value: int) -> bytes:
    """Return the value of a key."""
    return struct.pack("<Ii", INT32, value)


def float32(value: float) -> bytes:
    """Return the value of a key."""
    return struct.pack("<If", FLOAT32, value)


def boolean(value: bool) -> bytes:
    """Return the value of a key."""
    return struct.pack("<I?", BOOL, value)


def string(value: str) -> bytes:
    """Return the value of a key."""
    return struct.pack("<I", STRING) + _text(value.encode())


def array(values: Sequence[bytes] | NDArray[np.int32] | NDArray[np.float32]) -> bytes:
    """Return the value of a key: UTF-8 texts, or numbers of one type."""
    if not isinstance(values, np.ndarray):
        texts = b"".join(map(_text, values))
        return struct.pack("<IIQ", ARRAY, STRING, len(values)) + texts
    kind = INT32 if values.dtype == np.int32 else FLOAT32
    return struct.pack("<IIQ", ARRAY, kind, len(values)) + values.tobytes()


def header(keys: Mapping[str, bytes], tensors: Sequence[PlannedTensor]) -> bytes:
    """Return the bytes of a file before its first tensor.

    Args:
        keys: values by key.
        tensors: in the order in which they follow, each filled up to `ALIGNMENT`.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(keys))]
    parts += [_text(key.encode()) + value for key, value in keys.items()]
    offset = 0
    for tensor in tensors:
        shape = tensor.shape[::-1]  # the innermost axis comes first
        place = struct.pack(f"<{len(shape)}QIQ", *shape, TENSOR_TYPES[tensor.dtype], offset)
        parts.append(_text(tensor.name.encode()) + struct.pack("<I", len(shape)) + place)
        offset += padded(tensor.nbytes, ALIGNMENT)
    head = b"".join(parts)
    return head.ljust(padded(len(head), ALIGNMENT), b"\0")


def tensor_nbytes(shape: Sequence[int], dtype: str) -> int:
    """Return the length of a tensor; rows of Q8_0 are whole blocks."""
    items = int(np.prod(shape))
    return items * _BYTES_OF_BLOCK[dtype] // BLOCK


def q8_0(codes: NDArray[np.int8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the bytes of rows of codes [n, K], with those of a float16 scale for each block."""
    rows, columns = codes.shape
    blocks = np.empty((rows, columns // BLOCK, BLOCK + 2), np.uint8)
    blocks[..., :2] = scales.reshape(rows, -1, 2)
    blocks[..., 2:] = codes.view(np.uint8).reshape(rows, -1, BLOCK)
    return blocks


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
