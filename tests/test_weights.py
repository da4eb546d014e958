"""A weight says where its bytes lie, an index survives JSON or is refused, reading is no copy."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_grok.errors import BundleError, CheckpointError
from export_grok.weights import NUMPY_DTYPES, StoredDtype, Weight, WeightIndex, WeightReader

WEIGHT = Weight(name="w", file="dir/f", offset=3, dtype="float32", shape=(2, 3))

shared_folder = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

dtypes = st.sampled_from(list(NUMPY_DTYPES))
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def index_of(*weights: Weight, **files: int) -> WeightIndex:
    return WeightIndex(root=Path("root"), weights={w.name: w for w in weights}, files=files)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"file": "/etc/passwd"}, "w lies in '/etc/passwd'; a path below the index's folder"),
        ({"file": "../f"}, "w lies in '../f'; a path below the index's folder"),
        ({"file": "a/../../f"}, "w lies in 'a/../../f'; a path below the index's folder"),
        ({"file": ""}, "w lies in ''; a path below the index's folder"),
        (
            {"dtype": "float64"},
            "w has dtype 'float64'; known are int8, bfloat16, float16, float32",
        ),
        ({"dtype": ["int8"]}, "w has dtype .'int8'.; known are"),
        ({"offset": -1}, "w has offset -1 and shape .2, 3.; whole numbers from 0"),
        ({"offset": 1.0}, "w has offset 1.0 and shape"),
        ({"offset": True}, "w has offset True and shape"),
        ({"offset": None}, "w has offset None and shape"),
        ({"shape": (2, -3)}, "w has offset 3 and shape .2, -3."),
        ({"shape": (2.0,)}, "w has offset 3 and shape .2.0,."),
        ({"shape": (False,)}, "w has offset 3 and shape .False,."),
        ({"groups": 0}, "w has 0 groups of rows; a whole number from 1"),
        ({"groups": "8"}, "w has '8' groups of rows; a whole number from 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        dataclasses.replace(WEIGHT, **changes)


@settings(deadline=None)
@given(dtype=dtypes, shape=shapes, offset=st.integers(0, 100), data=st.data())
def test_a_block_is_the_bytes_that_numpy_slices(
    dtype: StoredDtype, shape: tuple[int, ...], offset: int, data: st.DataObject
) -> None:
    numpy_dtype = NUMPY_DTYPES[dtype]
    size = math.prod(shape) * numpy_dtype.itemsize
    file = np.random.default_rng(0).integers(0, 256, offset + size, dtype=np.uint8)
    whole = np.frombuffer(file.tobytes(), numpy_dtype, offset=offset).reshape(shape)
    weight = dataclasses.replace(WEIGHT, dtype=dtype, shape=shape, offset=offset)
    assert (weight.size, weight.nbytes) == (whole.size, whole.nbytes)
    axes = data.draw(st.integers(1, len(shape)))
    index = tuple(data.draw(st.integers(-length, length - 1)) for length in shape[:axes])
    block = weight.block(*index)
    assert (block.shape, block.dtype, block.file) == (shape[axes:], dtype, weight.file)
    assert block.name == f"w[{','.join(map(str, index))}]"
    expected = np.ascontiguousarray(whole[index]).tobytes()
    assert file[block.offset :][: block.nbytes].tobytes() == expected


@pytest.mark.parametrize("index", [2, -3])
def test_a_block_beyond_the_end_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        WEIGHT.block(index)


@shared_folder
@given(dtype=dtypes, shape=shapes, offset=st.integers(0, 65), tail=st.integers(0, 3))
def test_data_that_are_not_aligned_are_read_where_they_lie(
    dtype: StoredDtype, shape: tuple[int, ...], offset: int, tail: int, tmp_path: Path
) -> None:
    numpy_dtype = NUMPY_DTYPES[dtype]
    array = np.arange(math.prod(shape)).astype(numpy_dtype).reshape(shape)
    (tmp_path / "dir").mkdir(exist_ok=True)
    # Under a new name: the old file may still be mapped.
    (tmp_path / "dir" / "f").unlink(missing_ok=True)
    (tmp_path / "dir" / "f").write_bytes(b"\xff" * offset + array.tobytes() + b"\xff" * tail)
    weight = dataclasses.replace(WEIGHT, dtype=dtype, shape=shape, offset=offset)
    read = WeightReader(tmp_path).read(weight)
    assert read.dtype == numpy_dtype
    assert read.shape == shape
    assert read.tobytes() == array.tobytes()
    assert not read.flags.writeable
    assert not read.flags.owndata


def test_a_file_is_mapped_once_for_all_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(np.arange(6, dtype=np.int8).tobytes())
    reader = WeightReader(tmp_path)
    weight = Weight(name="w", file="f", offset=0, dtype="int8", shape=(2, 3))
    whole, row = reader.read(weight), reader.read(weight.block(1))
    assert np.shares_memory(whole, row)
    assert row.tolist() == [3, 4, 5]
    (tmp_path / "f").unlink()
    assert reader.read(weight).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("held", [1, 26])
def test_a_file_that_was_cut_is_told_with_both_lengths(held: int, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "f").write_bytes(bytes(held))
    with pytest.raises(CheckpointError) as caught:
        WeightReader(tmp_path).read(WEIGHT)
    assert f"{tmp_path / 'dir' / 'f'} has {held} bytes; w ends at 27" in str(caught.value)


def test_a_file_that_is_missing_empty_or_a_folder_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for file in ("none", "empty", "folder", "a\0b"):
        with pytest.raises(CheckpointError, match="cannot be mapped"):
            WeightReader(tmp_path).read(dataclasses.replace(WEIGHT, file=file))


@st.composite
def indexes(draw: st.DrawFn) -> WeightIndex:
    names = draw(st.lists(st.text(min_size=1), unique=True, max_size=5))
    weights = [
        Weight(
            name=name,
            file=draw(st.sampled_from(["a", "b/c", "é"])),
            offset=draw(st.integers(0, 2**40)),
            dtype=draw(dtypes),
            shape=draw(shapes),
            groups=draw(st.sampled_from([None, 1, 8])),
        )
        for name in names
    ]
    files: dict[str, int] = {}
    for weight in weights:
        end = weight.offset + weight.nbytes
        files[weight.file] = max(files.get(weight.file, 0), end)
    return index_of(*weights, **files)


@shared_folder
@given(index=indexes())
def test_an_index_survives_json(index: WeightIndex, tmp_path: Path) -> None:
    index.write(tmp_path / "weights.json")
    again = WeightIndex.read(tmp_path / "weights.json", root=index.root)
    assert again == index
    assert list(again) == list(index)


def test_what_lies_below_a_name_is_found_by_the_rest_of_it() -> None:
    names = ("layers.1.a", "layers.10.a", "layers.1.b", "a")
    index = index_of(*(dataclasses.replace(WEIGHT, name=name) for name in names))
    assert set(index.below("layers.1.")) == {"a", "b"}
    assert index.below("layers.1.")["a"] is index["layers.1.a"]


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Any]:
    """Return the JSON of a good index of two tensors."""
    scales = Weight(name="s", file="g", offset=0, dtype="bfloat16", shape=(8,), groups=8)
    index_of(WEIGHT, scales, **{"dir/f": 27, "g": 16}).write(tmp_path / "good.json")
    value: dict[str, Any] = json.loads((tmp_path / "good.json").read_bytes())
    return value


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("format_version",), 2, "has format version 2; this program reads 1: make it again"),
        (("files", "g"), 15, "s ends beyond g"),
        (("files", "g"), float("inf"), "the length of g is inf"),
        (("files", "g"), "16", "the length of g is '16'"),
        (("weights", 0, "file"), "../f", "damaged .w lies in '../f'"),
        (("weights", 0, "file"), "other", "damaged .'other'"),
        (("weights", 0, "name"), ["w"], "the name of a tensor is .'w'."),
        (("weights", 1, "dtype"), "int4", "damaged .s has dtype 'int4'"),
        (("weights", 1, "shape"), [10**400], "ends beyond g"),
    ],
)
def test_the_error_says_what_is_damaged(
    place: tuple[Any, ...], value: Any, said: str, written: dict[str, Any], tmp_path: Path
) -> None:
    changed = copy.deepcopy(written)
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(BundleError, match=said):
        WeightIndex.read(path, root=tmp_path)
