"""Released files are understood without being run, and whatever is wrong with one is said."""

import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from export_grok.errors import CheckpointError, UnsafePickleError
from export_grok.export.released_pickle import arrays_in
from export_grok.weights import WeightReader

DATA = Path(__file__).resolve().parents[1] / "data"
FILES = [
    pytest.param(path, id=f"{path.parent.parent.name}/{path.name}")
    for name in ("tiny", "tiny8", "deep13")
    for path in sorted((DATA / name / "ckpt-0").iterdir())[:14]
]
EXPERTS = DATA / "tiny" / "ckpt-0" / "tensor00002_000"
ATTENTION = DATA / "tiny" / "ckpt-0" / "tensor00005_000"
NORM = DATA / "tiny" / "ckpt-0" / "tensor00001_000"

BFLOAT16 = ml_dtypes.bfloat16


class QuantizedWeight8bit:
    """What the release's class is to a pickle: something with attributes."""

    weight: Any
    scales: Any


class StandardUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            return QuantizedWeight8bit
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def standard_arrays(path: Path) -> dict[str, Any]:
    dtype: Any = np.dtype(BFLOAT16)
    state = dtype.__reduce__()[2]
    loaded = StandardUnpickler(io.BytesIO(path.read_bytes())).load()
    # The file's dtype was written by another numpy. Loading it puts the flags of that numpy into
    # the one bfloat16 dtype of this process, which then has another hash.
    dtype.__setstate__(state)
    return vars(loaded) if isinstance(loaded, QuantizedWeight8bit) else {"array": loaded}


def written(folder: Path, data: bytes) -> Path:
    path = folder / "tensor00000_000"
    path.write_bytes(data)
    return path


def replaced(path: Path, old: bytes, new: bytes) -> bytes:
    """Return the bytes of `path` with its first `old` replaced by a `new` of the same length."""
    data = path.read_bytes()
    assert old in data
    assert len(old) == len(new)
    return data.replace(old, new, 1)


@pytest.mark.parametrize("path", FILES)
def test_arrays_are_those_that_pickle_loads(path: Path) -> None:
    found = arrays_in(path)
    expected = standard_arrays(path)
    reader = WeightReader(path.parent)
    assert found.keys() == expected.keys()
    for key, weight in found.items():
        array = reader.read(weight)
        assert (weight.name, weight.file) == (key, path.name)
        assert array.dtype == expected[key].dtype
        assert array.shape == expected[key].shape
        assert array.tobytes() == expected[key].tobytes()


@pytest.mark.parametrize("name", ["tiny", "tiny8", "deep13"])
def test_shapes_and_dtypes_are_those_of_the_original_program(name: str) -> None:
    for entry in json.loads((DATA / name / "ckpt_index.json").read_text()):
        found = arrays_in(DATA / name / "ckpt-0" / entry["file"])
        whole = found["weight"] if "weight" in found else found["array"]
        assert (list(whole.shape), whole.dtype) == (entry["shape"], entry["dtype"])
        if "scales" in found:
            assert list(found["scales"].shape) == entry["scales_shape"]
            assert found["scales"].dtype == entry["scales_dtype"]


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("dtype", [np.int8, np.float32, BFLOAT16])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 5), (2, 1, 3, 5), (300, 300)])
def test_what_numpy_pickles_now_is_read(
    tmp_path: Path, protocol: int, dtype: Any, shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    path = written(tmp_path, pickle.dumps(array, protocol))
    weight = arrays_in(path)["array"]
    assert (weight.file, weight.shape) == (path.name, shape)
    assert WeightReader(tmp_path).read(weight).tobytes() == array.tobytes()


class Touch:
    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_of_the_system_is_refused_and_not_made(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "witness"
    path = written(tmp_path, pickle.dumps(Touch(witness), protocol))
    with pytest.raises(UnsafePickleError, match=r"tensor00000_000 asks for '(posix|nt)\.system'"):
        arrays_in(path)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("__main__", "Other"),
        ("numpy", "load"),
        ("numpy.core", "multiarray._reconstruct"),
        ("numpy.dtype", "__class__"),
        ("ml_dtypes", "int4"),
        ("", ""),
    ],
)
def test_a_name_that_no_weight_needs_is_unsafe(tmp_path: Path, module: str, name: str) -> None:
    data = b"\x80\x04" + b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name)
    )
    path = written(tmp_path, data + pickle.STACK_GLOBAL + pickle.STOP)
    with pytest.raises(UnsafePickleError) as caught:
        arrays_in(path)
    assert repr(f"{module}.{name}") in str(caught.value)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((2, 3), np.float32, order="F"), "Fortran order"),
        (np.zeros(3, ">f4"), "byte order '>'"),
        (np.zeros(3, np.float64), "dtype 'f8'"),
        (np.zeros(3, np.uint8), "dtype 'u1'"),
        (np.array([None, 1], object), "dtype 'O8'"),
        (np.zeros(3, [("a", "f4")]), "dtype 'V4'"),
        ({"weight": np.zeros(3, np.int8)}, "neither"),
        ((np.zeros(3, np.int8),), "neither"),
        ("text", "neither"),
        ([1], "step b']'"),
    ],
)
def test_what_is_no_plain_array_is_refused(tmp_path: Path, array: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        arrays_in(written(tmp_path, pickle.dumps(array, 4)))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"K\x60K\x20\x86", b"K\x61K\x20\x86", "need another length"),
        (b"B\x00\x0c\x00\x00", b"B\xff\xff\xff\xff", "is cut or damaged: it needs 4294967295"),
        (b"B\x00\x0c\x00\x00", b"B\x01\x0c\x00\x00", "need another length"),
        (b"\x8c\x08__main__", b"\x8c\xff__main__", "no UTF-8"),
        (b"\x95\x5c\x0d", b"\x95\xff\xff", "frame of 65535 bytes"),
        (b"\x95\x5c\x0d", b"\x95\x10\x00", "does not end with its frame"),
        (b"h\x09", b"h\xfe", "recalls value 254"),
        (b")\x81", b"N\x81", "makes something that is no array"),
        (b"\x80\x04", b"\x80\x06", "pickle protocol"),
        (b"weight", b"wright", "neither"),
    ],
)
def test_a_lie_in_the_stream_is_seen(tmp_path: Path, old: bytes, new: bytes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        arrays_in(written(tmp_path, replaced(ATTENTION, old, new)))


def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    data = b"\x80\x04" + pickle.BINBYTES8 + struct.pack("<Q", 1 << 62) + b"abc"
    with pytest.raises(CheckpointError, match="it needs 4611686018427387904 bytes more and has 3"):
        arrays_in(written(tmp_path, data))


@pytest.mark.parametrize(
    "steps",
    [
        b".",
        b"0",
        b"(",
        b"(t.",
        b"u.",
        b"s.",
        b"b.",
        b"R.",
        b"\x81.",
        b"\x93.",
        b"\x94.",
        b"\x85.",
        b"}}}s.",
        b"}K\x01K\x02s.",
        b"}(K\x01u.",
        b"}\x94h\x00h\x00b.",
        b"K\x01K\x02\x93.",
        b"\x8a\xff" + b"\xff" * 255 + b".",
        b"c" + b"a" * 400 + b"\n",
        b"c\xff\n\xff\n",
        b"N" + b"\x85" * 5000 + b".",
        b"}" + b"\x94" * 5000 + b".",
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_a_wild_stream_is_a_fault_and_nothing_else(tmp_path: Path, steps: bytes) -> None:
    for start in (b"", b"\x80\x04"):
        with pytest.raises(CheckpointError):
            arrays_in(written(tmp_path, start + steps))


@pytest.mark.parametrize("path", [NORM, ATTENTION, EXPERTS])
def test_a_file_that_is_too_short_or_too_long_is_refused(tmp_path: Path, path: Path) -> None:
    data = path.read_bytes()
    for cut in (*range(1, 200), len(data) - 1):
        with pytest.raises(CheckpointError):
            arrays_in(written(tmp_path, data[:cut]))
    with pytest.raises(CheckpointError, match="goes on for 1 bytes after its end"):
        arrays_in(written(tmp_path, data + b"\x00"))


def test_what_cannot_be_opened_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        arrays_in(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no regular file"):
        arrays_in(tmp_path)
    with pytest.raises(CheckpointError, match="is empty; fetch it again"):
        arrays_in(written(tmp_path, b""))
