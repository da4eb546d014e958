"""Released weight files, written byte for byte as numpy 1.26, ml_dtypes and pickle protocol 4 do.

The pickle is made without its arrays' bytes, so its exact length is known for an array of any
size, and the bytes can come in blocks.
"""

import math
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from export_grok.export.parameters import Parameter
from export_grok.files import atomic_file
from export_grok.weights import NUMPY_DTYPES, StoredDtype, Weight

__all__ = ["ReleasedLayout", "released_layout", "write_released"]

# From the pickle module: bytes objects this long stand outside the frames, and a frame this long
# ends before the next value. A frame of fewer than MIN_FRAME bytes has no header.
FRAME_TARGET = 64 * 1024
MIN_FRAME = 4


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


@dataclass(frozen=True)
class _Made:
    """What calling `function` with `arguments` gives, after `state` was set."""

    function: _Global
    arguments: tuple[object, ...]
    state: object
    opcode: bytes = pickle.REDUCE


@dataclass(frozen=True)
class _Payload:
    key: str
    nbytes: int


# Code and state as numpy writes them: version, byte order, no fields, size, alignment, flags.
_DTYPES: dict[StoredDtype, tuple[str | _Global, tuple[object, ...]]] = {
    "int8": ("i1", (3, "|", None, None, None, -1, -1, 0)),
    "float32": ("f4", (3, "<", None, None, None, -1, -1, 0)),
    "bfloat16": (_Global("ml_dtypes", "bfloat16"), (3, "<", None, None, None, 2, 2, 80)),
}


@dataclass(frozen=True, kw_only=True)
class ReleasedLayout:
    """A released weight file but for its arrays' bytes.

    Attributes:
        size: of the file in bytes.
        arrays: where the arrays lie in it, by key.
        parts: what the file consists of: bytes, or the key of the array whose bytes stand there.
    """

    size: int
    arrays: dict[str, Weight]
    parts: tuple[bytes | str, ...]


def released_layout(arrays: Mapping[str, Parameter], file: str = "tensor") -> ReleasedLayout:
    """Return the layout of the file that holds `arrays`: `weight` and `scales`, or one `array`.

    Args:
        arrays: dtype and shape of each array, by key. Their names play no part.
        file: what the `file` of the layout's arrays says.
    """
    made = {key: _array(key, parameter) for key, parameter in arrays.items()}
    pickler = _Pickler()
    if set(made) == {"array"}:
        pickler.save(made["array"])
    else:
        quantised = _Global("__main__", "QuantizedWeight8bit")
        state = {"weight": made["weight"], "scales": made["scales"]}
        pickler.save(_Made(quantised, (), state, pickle.NEWOBJ))
    parts = pickler.finish()

    places, offset = {}, 0
    for part in parts:
        if isinstance(part, _Payload):
            parameter = arrays[part.key]
            places[part.key] = Weight(
                name=part.key,
                file=file,
                offset=offset,
                dtype=parameter.dtype,
                shape=parameter.shape,
            )
        offset += _length(part)
    plain = tuple(part.key if isinstance(part, _Payload) else part for part in parts)
    return ReleasedLayout(size=offset, arrays=places, parts=plain)


def write_released(
    path: Path,
    arrays: Mapping[str, Parameter],
    blocks: Callable[[str], Iterable[bytes | memoryview]] | None,
) -> dict[str, Weight]:
    """Write the released file `path` and return where its arrays lie in it.

    Args:
        path: appears whole, or not at all.
        arrays: dtype and shape of `weight` and `scales`, or of one `array`.
        blocks: from the key of an array to its bytes, in blocks of any length. With None the
            arrays are holes: they read as zeros and take no room on the disk.

    Raises:
        OutputError: `path` cannot be written.
        ValueError: the blocks of an array are not as long as the array.
    """
    layout = released_layout(arrays, path.name)
    with atomic_file(path) as file:
        for part in layout.parts:
            if isinstance(part, bytes):
                file.write(part)
                continue
            length = layout.arrays[part].nbytes
            if blocks is None:
                file.seek(length, os.SEEK_CUR)
                continue
            written = sum(file.write(block) for block in blocks(part))
            if written != length:
                raise ValueError(f"{path}: {part} has blocks of {written} bytes, not {length}")
    return layout.arrays


def _array(key: str, parameter: Parameter) -> _Made:
    code, dtype_state = _DTYPES[parameter.dtype]
    dtype = _Made(_Global("numpy", "dtype"), (code, False, True), dtype_state)
    nbytes = math.prod(parameter.shape) * NUMPY_DTYPES[parameter.dtype].itemsize
    return _Made(
        _Global("numpy.core.multiarray", "_reconstruct"),
        (_Global("numpy", "ndarray"), (0,), b"b"),
        (1, parameter.shape, dtype, False, _Payload(key, nbytes)),
    )


def _length(part: bytes | _Payload) -> int:
    return part.nbytes if isinstance(part, _Payload) else len(part)


class _Pickler:
    """Pickle protocol 4 for the few kinds of value in a weight file.

    The real one keeps a value by its identity. Equal texts, names and constants are one object
    there, so here they are kept by value; tuples and what was made are never met twice.
    """

    def __init__(self) -> None:
        self._done: list[bytes | _Payload] = [pickle.PROTO + b"\x04"]
        self._frame: list[bytes | _Payload] = []
        self._memo: dict[object, int] = {}
        self._slots = 0

    def finish(self) -> list[bytes | _Payload]:
        self._write(pickle.STOP)
        self._end_frame()
        joined: list[bytes | _Payload] = [b""]
        for part in self._done:
            if isinstance(part, bytes) and isinstance(joined[-1], bytes):
                joined[-1] += part
            else:
                joined.append(part)
        return joined

    def save(self, value: object) -> None:
        if sum(map(_length, self._frame)) >= FRAME_TARGET:
            self._end_frame()
        match value:
            case None:
                self._write(pickle.NONE)
            case bool():
                self._write(pickle.NEWTRUE if value else pickle.NEWFALSE)
            case int():
                self._save_int(value)
            case str() | bytes() | _Global() if value in self._memo:
                self._write(pickle.BINGET + bytes([self._memo[value]]))
            case str():
                text = value.encode()
                self._write(pickle.SHORT_BINUNICODE + bytes([len(text)]) + text)
                self._keep(value)
            case bytes():
                self._write(pickle.SHORT_BINBYTES + bytes([len(value)]) + value)
                self._keep(value)
            case _Global():
                self.save(value.module)
                self.save(value.name)
                self._write(pickle.STACK_GLOBAL)
                self._keep(value)
            case tuple():
                self._save_tuple(value)
            case dict():
                self._save_dict(value)
            case _Made():
                self.save(value.function)
                self.save(value.arguments)
                self._write(value.opcode)
                self._keep()
                self.save(value.state)
                self._write(pickle.BUILD)
            case _Payload():
                self._save_payload(value)

    def _save_int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._write(pickle.BININT1 + struct.pack("<B", value))
        elif 0 <= value < 1 << 16:
            self._write(pickle.BININT2 + struct.pack("<H", value))
        else:
            self._write(pickle.BININT + struct.pack("<i", value))

    def _save_tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self._write(pickle.EMPTY_TUPLE)
            return
        if len(value) > 3:
            self._write(pickle.MARK)
        for item in value:
            self.save(item)
        short = (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
        self._write(short[len(value) - 1] if len(value) <= 3 else pickle.TUPLE)
        self._keep()

    def _save_dict(self, value: dict[object, object]) -> None:
        self._write(pickle.EMPTY_DICT)
        self._keep()
        self._write(pickle.MARK)
        for key, item in value.items():
            self.save(key)
            self.save(item)
        self._write(pickle.SETITEMS)

    def _save_payload(self, value: _Payload) -> None:
        if value.nbytes < 1 << 8:
            header = pickle.SHORT_BINBYTES + struct.pack("<B", value.nbytes)
        elif value.nbytes < 1 << 32:
            header = pickle.BINBYTES + struct.pack("<I", value.nbytes)
        else:
            header = pickle.BINBYTES8 + struct.pack("<Q", value.nbytes)
        if value.nbytes >= FRAME_TARGET:
            self._end_frame()
            self._done += [header, value]
        else:
            self._frame += [header, value]
        self._keep()

    def _keep(self, value: object = None) -> None:
        self._write(pickle.MEMOIZE)
        if value is not None:
            self._memo[value] = self._slots
        self._slots += 1

    def _write(self, data: bytes) -> None:
        self._frame.append(data)

    def _end_frame(self) -> None:
        length = sum(map(_length, self._frame))
        if length >= MIN_FRAME:
            self._done.append(pickle.FRAME + struct.pack("<Q", length))
        self._done += self._frame
        self._frame = []
