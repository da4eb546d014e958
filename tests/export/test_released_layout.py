"""Released files are written byte for byte as the release was, at any size."""

import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from export_grok.config import GROK_1
from export_grok.errors import OutputError
from export_grok.export.parameters import Parameter, model_parameters
from export_grok.export.released_layout import released_layout, write_released
from export_grok.export.released_pickle import arrays_in

DATA = Path(__file__).resolve().parents[1] / "data"


def parameter(dtype: Any, *shape: int) -> Parameter:
    return Parameter(name="any", dtype=dtype, shape=shape)


@pytest.mark.parametrize("name", ["tiny", "tiny8", "deep13"])
def test_every_fixture_is_written_again_byte_for_byte(tmp_path: Path, name: str) -> None:
    for path in (DATA / name / "ckpt-0").iterdir():
        data, found = path.read_bytes(), arrays_in(path)

        def blocks(key: str, data: bytes = data, found: Any = found) -> Iterator[bytes]:
            start, end = found[key].offset, found[key].offset + found[key].nbytes
            for block in range(start, end, 1000):
                yield data[block : min(block + 1000, end)]

        arrays = {key: parameter(w.dtype, *w.shape) for key, w in found.items()}
        placed = write_released(tmp_path / path.name, arrays, blocks)
        assert (tmp_path / path.name).read_bytes() == data
        places = {key: (w.file, w.offset, w.shape, w.dtype) for key, w in placed.items()}
        assert places == {key: (w.file, w.offset, w.shape, w.dtype) for key, w in found.items()}


# Source: the sizes and offsets of the published files, docs of rmems/xai-dissect.
@pytest.mark.parametrize(
    ("name", "size", "offset"),
    [
        ("embedding.weight", 3_221_225_637, 151),
        ("layers.0.experts.gate", 1_611_137_347, 201),
        ("layers.0.experts.up", 1_611_137_347, 201),
        ("layers.0.experts.down", 1_611_399_491, 201),
        ("layers.0.attention.out", 37_847_359, None),
        ("layers.0.attention.query", 37_761_334, None),
        ("layers.0.attention.key", 6_293_814, None),
        ("layers.0.attention.value", 6_293_814, None),
        ("layers.0.router.weight", 196_770, None),
        ("final_norm.scale", 24_727, 146),
    ],
)
def test_full_size_files_have_the_published_sizes(
    name: str, size: int, offset: int | None
) -> None:
    parameters = model_parameters(GROK_1)
    if name in parameters:
        layout = released_layout({"array": parameters[name]})
    else:
        layout = released_layout({k: parameters[f"{name}.{k}"] for k in ("weight", "scales")})
    assert layout.size == size
    assert offset in (None, next(iter(layout.arrays.values())).offset)


class QuantizedWeight8bit:
    def __init__(self, weight: Any, scales: Any) -> None:
        self.weight = weight
        self.scales = scales


@pytest.fixture
def numpy_1_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this numpy and this test write the names that the release has."""
    reconstruct: Any = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    core = types.ModuleType("numpy.core.multiarray")
    core._reconstruct = reconstruct  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numpy.core.multiarray", core)
    monkeypatch.setattr(reconstruct, "__module__", "numpy.core.multiarray")
    monkeypatch.setattr(QuantizedWeight8bit, "__module__", "__main__")
    monkeypatch.setattr(
        sys.modules["__main__"], "QuantizedWeight8bit", QuantizedWeight8bit, raising=False
    )


# Lengths on both sides of where an opcode or the framing changes.
@pytest.mark.usefixtures("numpy_1_pickles")
@pytest.mark.parametrize("groups", [1, 127, 128, 129, 300, 32767, 32768, 40000])
@pytest.mark.parametrize("length", [2, 255, 256, 65100, 65300, 65400, 65535, 65536, 70000])
def test_any_length_is_framed_as_pickle_does_it(length: int, groups: int) -> None:
    weight = np.ones((1, length), np.int8)
    scales = np.ones((groups,), ml_dtypes.bfloat16)
    layout = released_layout(
        {"weight": parameter("int8", 1, length), "scales": parameter("bfloat16", groups)}
    )
    payloads = {"weight": weight.tobytes(), "scales": scales.tobytes()}
    ours = b"".join(payloads[part] if isinstance(part, str) else part for part in layout.parts)
    theirs = pickle.dumps(QuantizedWeight8bit(weight, scales), 4)
    # The last number of a dtype's state are flags of the ml_dtypes at hand; the release has 80.
    flags = ml_dtypes.bfloat16(0).dtype.flags
    state = b"K\x02K\x02K%c"
    assert ours == theirs.replace(state % flags, state % 80)


@pytest.mark.usefixtures("numpy_1_pickles")
@pytest.mark.parametrize("shape", [(1,), (2, 3), (2, 3, 4), (1, 2, 3, 4), (70000,), (1, 0)])
def test_any_rank_is_written_as_pickle_does_it(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)
    layout = released_layout({"array": parameter("float32", *shape)})
    ours = b"".join(array.tobytes() if isinstance(p, str) else p for p in layout.parts)
    assert ours == pickle.dumps(array, 4)


def test_a_hole_reads_as_zeros_and_takes_no_room(tmp_path: Path) -> None:
    arrays = {"weight": parameter("int8", 64 << 20), "scales": parameter("bfloat16", 1, 3)}
    path = tmp_path / "tensor00000_000"
    placed = write_released(path, arrays, None)
    assert path.stat().st_size == released_layout(arrays).size
    assert path.stat().st_blocks * 512 < 1 << 20
    assert arrays_in(path).keys() == placed.keys()


@pytest.mark.parametrize("block", [b"abc", b"abcde"])
def test_blocks_of_another_length_leave_no_file(tmp_path: Path, block: bytes) -> None:
    with pytest.raises(ValueError, match=f"array has blocks of {len(block)} bytes, not 4"):
        write_released(tmp_path / "t", {"array": parameter("int8", 4)}, lambda _: [block])
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        write_released(tmp_path / "no" / "t", {"array": parameter("int8", 4)}, None)
