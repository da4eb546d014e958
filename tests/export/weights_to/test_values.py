"""What a dtype cannot hold is refused before anything is written, and what it loses is said."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from export_grok.errors import CheckpointError
from export_grok.export.weights_to.options import WEIGHT_DTYPES, WeightDtype
from export_grok.export.weights_to.values import (
    ROWS,
    check_scales,
    memory_needed,
    rounded,
    rows_of_floats,
    rows_of_matrix,
)
from export_grok.weights import Weight, WeightIndex
from tests.export.weights_to.expected import Model, floats, turned


def index_of(folder: Path, **arrays: Any) -> WeightIndex:
    """Write arrays as files and return where they lie."""
    weights = {}
    for name, array in arrays.items():
        (folder / name).write_bytes(array.tobytes())
        dtype = str(array.dtype)
        weights[name] = Weight(name=name, file=name, offset=0, dtype=dtype, shape=array.shape)  # type: ignore[arg-type]
    return WeightIndex(root=folder, weights=weights, files={})


def scales(*values: float) -> np.ndarray[Any, Any]:
    return np.array([values], ml_dtypes.bfloat16)


def test_a_matrix_wider_than_a_block_is_whole(tmp_path: Path) -> None:
    columns = 2 * ROWS + 5
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (6, columns), np.int8)
    of_groups = rng.uniform(0.5, 2, (3, columns)).astype(ml_dtypes.bfloat16)
    index = index_of(tmp_path, **{"m.weight": codes, "m.scales": of_groups})
    blocks = list(rows_of_matrix(index, "m"))
    assert [len(block.codes) for block in blocks] == [ROWS, ROWS, 5]
    values = np.concatenate([block.values() for block in blocks])
    assert np.array_equal(values, turned(index, "m"))
    assert np.array_equal(np.concatenate([block.codes for block in blocks]), codes.T)


def test_a_table_longer_than_a_block_is_whole(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, index = model
    monkeypatch.setattr("export_grok.export.weights_to.values.BLOCK_ITEMS", 7 * config.emb_size)
    blocks = list(rows_of_floats(index, "embedding.weight"))
    assert [len(block) for block in blocks] == [7] * 13 + [5]
    assert np.array_equal(np.concatenate(blocks), floats(index, "embedding.weight"))


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_usual_scales_lose_nothing(model: Model, dtype: WeightDtype) -> None:
    assert check_scales(model[1], dtype) == 0


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_scales_that_are_no_numbers_are_all_named(dtype: WeightDtype, tmp_path: Path) -> None:
    index = index_of(tmp_path, a=scales(1, np.nan), b=scales(1, 2), c=scales(np.inf))
    with pytest.raises(CheckpointError) as caught:
        check_scales(index, dtype)
    assert [fault.split()[0] for fault in caught.value.faults] == ["a", "c"]


def test_scales_beyond_float16_are_refused_where_they_become_it(tmp_path: Path) -> None:
    index = index_of(tmp_path, a=scales(1e5))
    narrow: tuple[WeightDtype, ...] = ("int8", "float16")
    for dtype in narrow:
        with pytest.raises(CheckpointError, match=r"a goes up to 9.984e\+04, and may to"):
            check_scales(index, dtype)
    assert check_scales(index, "bfloat16") == check_scales(index, "float32") == 0
    # 600 is a float16, and 128 times it is none.
    index = index_of(tmp_path, a=scales(600))
    assert check_scales(index, "int8") == 0
    with pytest.raises(CheckpointError):
        check_scales(index, "float16")


def test_what_float16_takes_from_a_small_scale_is_said(tmp_path: Path) -> None:
    smallest = 2.0**-24
    assert check_scales(index_of(tmp_path, a=scales(2**-17 * 1.9921875)), "int8") == 0
    assert check_scales(index_of(tmp_path, a=scales(0, smallest)), "int8") == 0
    assert check_scales(index_of(tmp_path, a=scales(1.5 * smallest)), "int8") == pytest.approx(
        1 / 3
    )
    assert check_scales(index_of(tmp_path, a=scales(smallest / 4)), "int8") == 1
    assert check_scales(index_of(tmp_path, a=scales(smallest / 4)), "bfloat16") == 0


def test_a_value_beyond_float16_is_refused() -> None:
    values = np.array([65504, -65504], np.float32)
    assert rounded(values, "float16", "x").view(np.float16).tolist() == [65504, -65504]
    with pytest.raises(CheckpointError, match="x has values or scales beyond 65504"):
        rounded(2 * values, "float16", "x")


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    index = index_of(tmp_path, **{"m.weight": np.zeros((4, 4), np.int8), "m.scales": scales(1)})
    (tmp_path / "m.weight").write_bytes(bytes(15))
    with pytest.raises(CheckpointError, match=r"m\.weight ends within m\.weight"):
        next(rows_of_matrix(index, "m"))


def test_the_memory_of_the_published_model_is_that_of_one_expert(model: Model) -> None:
    from export_grok.config import GROK_1

    assert memory_needed(GROK_1) < 0.5e9
    assert memory_needed(model[0]) < 0.1e9
