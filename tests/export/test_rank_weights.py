"""The files of all ranks together hold the bytes of the source, each rank those of its part."""

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from export_grok.artifacts import WEIGHT_INDEX, rank_folder
from export_grok.config import GROK_1, GrokConfig
from export_grok.errors import CheckpointError, ConfigError, OutputError
from export_grok.export import rank_weights
from export_grok.export.head import write_head
from export_grok.export.load import tensor_from_array
from export_grok.export.parameters import layer_parameters
from export_grok.export.partition import cut_axis
from export_grok.export.rank_weights import part_blocks, rank_index, write_ranks
from export_grok.plugins.int8_linear.reference import dequantise
from export_grok.weights import Weight, WeightIndex, WeightReader
from tests.bundles import hashes
from tests.conftest import load_golden

Arrays = dict[str, NDArray[Any]]

GROUPS = [("tiny", 2), *((name, ranks) for name in ("tiny8", "deep13") for ranks in (1, 2, 4, 8))]


def arrays_of(index: WeightIndex) -> Arrays:
    """Return all tensors of an index, by name."""
    reader = WeightReader(index.root)
    return {weight.name: reader.read(weight) for weight in index}


def packed(
    config: GrokConfig, index: WeightIndex, head: WeightIndex, out: Path, ranks: int
) -> list[Arrays]:
    """Write the files of ranks and return what the index of each says they hold."""
    names = write_ranks(config, index, head, out, ranks)
    assert {name for name in hashes(out) if name.startswith("rank_")} == set(names)
    roots = [out / rank_folder(rank) for rank in range(ranks)]
    return [arrays_of(WeightIndex.read(root / WEIGHT_INDEX, root=root)) for root in roots]


def in_layer(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def check_whole(config: GrokConfig, whole: Arrays, parts: list[Arrays]) -> None:
    """Hold the parts of all ranks, put together again, to the bytes of the whole."""
    rank = config.for_rank(len(parts))
    for name, array in whole.items():
        axis = cut_axis(in_layer(name), array.shape, rank)
        found = [own[name] for own in parts]
        if axis is None:
            assert all(part.tobytes() == array.tobytes() for part in found), name
        else:
            assert np.concatenate(found, axis).tobytes() == array.tobytes(), name
    assert all(own.keys() == whole.keys() for own in parts)


@pytest.mark.parametrize(("name", "ranks"), GROUPS)
def test_the_parts_of_all_ranks_are_the_bytes_of_the_source(
    name: str, ranks: int, tmp_path: Path
) -> None:
    golden = load_golden(name)
    parts = packed(golden.config, golden.index, golden.index, tmp_path, ranks)
    check_whole(golden.config, arrays_of(golden.index), parts)


def test_an_int8_head_is_shared_too(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    head = write_head(golden.config, golden.index, tmp_path)
    parts = packed(golden.config, golden.index, head, tmp_path, 4)
    check_whole(golden.config, arrays_of(golden.index) | arrays_of(head), parts)
    assert parts[0]["unembedding.weight"].shape == (128, 160)


@pytest.mark.parametrize(("name", "ranks"), GROUPS)
def test_scales_fit_the_rows_of_any_rank_of_any_number_bit_for_bit(
    name: str, ranks: int, tmp_path: Path
) -> None:
    """Scales that were cut apart from their rows would give another one."""
    golden = load_golden(name)
    parts = packed(golden.config, golden.index, golden.index, tmp_path, ranks)
    whole = arrays_of(golden.index)
    for weight in (name for name in whole if name.endswith(".weight")):
        scales = f"{weight.removesuffix('.weight')}.scales"
        if scales not in whole:
            continue
        axis = cut_axis(in_layer(weight), whole[weight].shape, golden.config.for_rank(ranks))
        wanted = dequantised(whole[weight], whole[scales])
        found = [dequantised(own[weight], own[scales]) for own in parts]
        np.testing.assert_array_equal(
            found[0] if axis is None else np.concatenate(found, axis), wanted
        )


def dequantised(weight: NDArray[Any], scales: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = dequantise(
        tensor_from_array(weight), tensor_from_array(scales), torch.float32
    ).numpy()
    return found


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_reads_its_part_of_the_bytes_and_what_all_have(ranks: int) -> None:
    golden = load_golden("tiny8")
    shared = whole = 0
    for weight in golden.index:
        axis = cut_axis(in_layer(weight.name), weight.shape, golden.config.for_rank(ranks))
        whole += weight.nbytes
        shared += weight.nbytes if axis is None else 0
    for rank in range(ranks):
        read = sum(
            block.nbytes
            for weight in golden.index
            for block in part_blocks(golden.index, golden.config, weight.name, ranks, rank)
        )
        assert read == (whole - shared) // ranks + shared
        assert read < 1.2 * whole / ranks


def test_every_tensor_begins_at_a_multiple_of_64_bytes_and_the_groups_are_those_of_the_rank(
    tmp_path: Path,
) -> None:
    golden = load_golden("deep13")
    planned = rank_index(golden.config, golden.index, golden.index, tmp_path, 4)
    assert all(weight.offset % 64 == 0 for weight in planned)
    assert planned["layers.3.experts.down.weight"].groups == 2
    assert planned["layers.3.experts.down.scales"].shape == (8, 2, 64)
    assert planned["layers.3.experts.gate.weight"].groups == 1
    assert not any(tmp_path.iterdir())


# ---- full size: as many bytes as are looked at lie on the disk


def sparse_matrix(
    name: str, folder: Path
) -> tuple[WeightIndex, Callable[[int, int], NDArray[Any]]]:
    """Return the index of a full-size tensor of zeros, and a way to write rows of it."""
    parameter = layer_parameters(GROK_1, 0)[f"layers.0.{name}"]
    weight = Weight(
        name=parameter.name, file="file", offset=37, dtype=parameter.dtype, shape=parameter.shape
    )
    with (folder / "file").open("wb") as file:
        file.truncate(37 + weight.nbytes)

    def written(expert: int, row: int) -> NDArray[Any]:
        width = weight.shape[-1]
        content = np.random.default_rng([expert, row]).integers(-128, 128, width, np.int8)
        number = expert * weight.shape[-2] + row if len(weight.shape) > 2 else row
        with (folder / "file").open("r+b") as file:
            file.seek(37 + number * width)
            file.write(content.tobytes())
        return content

    index = WeightIndex(
        root=folder,
        weights={weight.name: weight},
        files={"file": (folder / "file").stat().st_size},
    )
    return index, written


@pytest.mark.parametrize(
    ("name", "by_rows"), [("attention.query", False), ("attention.out", True)]
)
def test_a_full_size_matrix_goes_by_blocks_to_the_ranks(
    name: str, by_rows: bool, tmp_path: Path
) -> None:
    index, written = sparse_matrix(f"{name}.weight", tmp_path)
    rows = {row: written(0, row) for row in (0, 767, 768, 3071, 6143)}
    ranks = 8
    tracemalloc.start()
    for rank in range(ranks):
        first, columns = 0, slice(768 * rank, 768 * (rank + 1))
        for block in part_blocks(index, GROK_1, f"layers.0.{name}.weight", ranks, rank):
            assert block.nbytes <= rank_weights.BLOCK_BYTES
            for row, content in rows.items():
                place = row - 768 * rank if by_rows else row
                if first <= place < first + len(block):
                    wanted = content if by_rows else content[columns]
                    np.testing.assert_array_equal(block[place - first], wanted)
            first += len(block)
        assert first == (768 if by_rows else 6144)
    assert tracemalloc.get_traced_memory()[1] < 3 * rank_weights.BLOCK_BYTES
    tracemalloc.stop()


def test_full_size_experts_go_to_the_ranks_by_whole_groups_of_rows(tmp_path: Path) -> None:
    index, written = sparse_matrix("experts.down.weight", tmp_path)
    name, ranks, rank = "layers.0.experts.down.weight", 8, 5
    first_row = 32768 // ranks * rank
    wanted = {
        (expert, row): written(expert, first_row + row) for expert, row in ((0, 0), (7, 4095))
    }
    blocks = part_blocks(index, GROK_1, name, ranks, rank)
    rows_seen = 0
    for block in blocks:
        for (expert, row), content in wanted.items():
            place = expert * 4096 + row - rows_seen
            if 0 <= place < len(block):
                np.testing.assert_array_equal(block[place], content)
        rows_seen += len(block)
        if rows_seen == 4096:  # the other experts are zeros but for the last row
            break
    assert rows_seen == 4096


def test_a_rank_of_grok_1_has_a_share_of_every_matrix() -> None:
    weights = [
        Weight(name=p.name, file="f", offset=0, dtype=p.dtype, shape=p.shape, groups=p.groups)
        for layer in range(64)
        for p in layer_parameters(GROK_1, layer).values()
    ]
    weights += [
        Weight(name=name, file="f", offset=0, dtype="float32", shape=shape)
        for name, shape in (
            ("embedding.weight", (131072, 6144)),
            ("final_norm.scale", (6144,)),
        )
    ]
    index = WeightIndex(root=Path(), weights={w.name: w for w in weights}, files={"f": 0})
    whole = sum(weight.nbytes for weight in weights)
    for ranks in (2, 4, 8):
        planned = rank_index(GROK_1, index, index, Path(), ranks)
        assert sum(planned.files.values()) == pytest.approx(whole / ranks, rel=1e-3)


# ---- refused


def changed(index: WeightIndex, name: str, **changes: Any) -> WeightIndex:
    weight = dataclasses.replace(index[name], **changes)
    return dataclasses.replace(index, weights=index.weights | {name: weight})


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"groups": 3}, "layers.1.experts.down.weight has 3 groups.*the model has 8.*2 ranks"),
        (
            {"shape": (8, 200, 128)},
            r"layers.1.experts.down.weight is int8 \[8, 200, 128\]; 2 ranks",
        ),
        ({"dtype": "float16"}, "layers.1.experts.down.weight is float16.*share int8"),
    ],
)
def test_a_tensor_that_is_not_the_models_is_named_and_nothing_written(
    changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    golden = load_golden("tiny8")
    index = changed(golden.index, "layers.1.experts.down.weight", **changes)
    with pytest.raises(CheckpointError, match=wanted):
        write_ranks(golden.config, index, index, tmp_path, 2)
    assert not any(tmp_path.iterdir())


def test_scales_of_another_number_of_groups_are_named(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    index = changed(golden.index, "layers.0.attention.out.scales", shape=(1, 128))
    with pytest.raises(CheckpointError, match=r"out.scales is bfloat16 \[1, 128\]; 8 ranks.*\[8,"):
        write_ranks(golden.config, index, index, tmp_path, 8)


def test_groups_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    config = dataclasses.replace(golden.config, row_parallel_scale_groups=4)
    with pytest.raises(ConfigError, match="4 scale groups cannot be shared evenly by 8 ranks"):
        write_ranks(config, golden.index, golden.index, tmp_path, 8)
    assert not any(tmp_path.iterdir())


def test_a_tensor_that_is_missing_or_cut_is_named(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    weights = dict(golden.index.weights)
    del weights["layers.2.router.weight"]
    index = dataclasses.replace(golden.index, weights=weights)
    with pytest.raises(CheckpointError, match=r"layers.2.router.weight is missing"):
        write_ranks(golden.config, index, index, tmp_path, 2)
    beyond = changed(golden.index, "layers.2.router.weight", offset=1 << 30)
    with pytest.raises(CheckpointError, match=r"layers.2.router.weight ends at.*was cut"):
        write_ranks(golden.config, beyond, beyond, tmp_path, 2)
    assert not (tmp_path / "rank_0" / "layer_02.weights").exists()
    assert not list(tmp_path.rglob("*.partial"))


def test_files_that_are_whole_are_kept_and_others_written(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    arguments = (golden.config, golden.index, golden.index, tmp_path, 2)
    write_ranks(*arguments)
    before = hashes(tmp_path)
    cut, gone, kept = (
        tmp_path / f"rank_1/{f}.weights" for f in ("layer_00", "layer_01", "embedding")
    )
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    stamp = kept.stat().st_mtime_ns
    done: list[int] = []
    write_ranks(*arguments, resume=True, progress=done.append)
    assert hashes(tmp_path) == before
    assert kept.stat().st_mtime_ns == stamp
    planned = rank_index(*arguments)
    assert sum(done) == pytest.approx(2 * sum(planned.files.values()), rel=0.01)
    write_ranks(*arguments)
    assert kept.stat().st_mtime_ns != stamp


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    (tmp_path / "rank_1").write_bytes(b"a file")
    with pytest.raises(OutputError, match="cannot write"):
        write_ranks(golden.config, golden.index, golden.index, tmp_path, 2)
