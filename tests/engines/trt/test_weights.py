"""Every weight reaches the device: its bytes, or a rank's part of them, and no byte twice."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.config import Dtype, GrokConfig
from export_grok.engines.trt.record import Binding, GraphRecord, Sizes, TrtRecord
from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.engines.trt.weights import RankWeights, Share, _blocks
from export_grok.errors import BundleError, CheckpointError
from export_grok.export.contract import GraphKind, weight_prefix
from export_grok.export.partition import part_of
from export_grok.weights import Weight, WeightIndex, WeightReader
from tests.conftest import Golden, load_golden
from tests.engines.trt.fake_device import FakeDevice
from tests.engines.trt.records import record_for

SMALL = 256  # bytes of staging: most tensors go through it in many blocks


def loaded(
    golden: Golden, ranks: int, rank: int, dtype: Dtype = "bfloat16"
) -> tuple[TrtRecord, FakeDevice, RankWeights]:
    record = record_for(golden.config, Sizes(tensor_parallel=ranks), dtype)
    device = FakeDevice()
    weights = weights_of(record, golden.index, golden.config, rank)
    weights.load(device, staging=SMALL)
    return record, device, weights


def weights_of(
    record: TrtRecord, index: WeightIndex, config: GrokConfig, rank: int = 0
) -> RankWeights:
    return RankWeights(record, index, index, layers=config.num_layers, rank=rank)


def bindings(record: TrtRecord, config: GrokConfig) -> Iterable[tuple[GraphRecord, int, Binding]]:
    for graph in record.graphs:
        for layer in range(config.num_layers if graph.kind == "layer" else 1):
            for binding in graph.bindings:
                if binding.weight:
                    yield graph, layer, binding


def on_device(device: FakeDevice, address: int, binding: Binding) -> NDArray[Any]:
    dtype = ELEMENTS[binding.dtype]
    raw = device.at(address, int(np.prod(binding.shape)) * dtype.itemsize)
    return raw.view(dtype).reshape(binding.shape)


@pytest.mark.parametrize(
    ("name", "ranks"), [("tiny", 1), ("tiny", 2), ("tiny8", 2), ("tiny8", 4), ("tiny8", 8)]
)
def test_the_parts_of_all_ranks_are_the_stored_tensor(name: str, ranks: int) -> None:
    golden = load_golden(name)
    parts = [loaded(golden, ranks, rank) for rank in range(ranks)]
    reader = WeightReader(golden.index.root)
    record = parts[0][0]
    seen = set()
    for graph, layer, binding in bindings(record, golden.config):
        found = [
            on_device(device, weights.addresses(graph, layer)[binding.name], binding)
            for _, device, weights in parts
        ]
        stored = golden.index[f"{weight_prefix(graph.kind, layer)}{binding.weight}"]
        seen.add(stored.name)
        wanted = reader.read(stored).astype(ELEMENTS[binding.dtype])
        if binding.cut is None:
            assert all(array.tobytes() == wanted.tobytes() for array in found)
        else:
            assert np.concatenate(found, axis=binding.cut).tobytes() == wanted.tobytes()
    assert seen == {*golden.index.weights}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_reads_its_share_of_the_bytes(ranks: int) -> None:
    golden = load_golden("tiny8")
    read = [loaded(golden, ranks, rank)[2].bytes_read for rank in range(ranks)]
    stored = sum(weight.nbytes for weight in golden.index)
    record = record_for(golden.config, Sizes(tensor_parallel=ranks))
    everywhere = sum(
        golden.index[f"{weight_prefix(graph.kind, layer)}{binding.weight}"].nbytes
        for graph, layer, binding in bindings(record, golden.config)
        if binding.cut is None and graph.phase == "decode" and graph.kind in ("layer", "head")
    )
    assert everywhere < 0.05 * stored  # norms and routers
    assert read == [(stored - everywhere) // ranks + everywhere] * ranks


def test_one_rank_reads_and_holds_everything_once() -> None:
    golden = load_golden("tiny")
    _, device, weights = loaded(golden, 1, 0, "float32")
    stored = sum(weight.nbytes for weight in golden.index)
    assert weights.bytes_read == weights.nbytes == device.allocated == stored
    assert len(device.buffers) == len(golden.index.weights)


def test_the_table_is_rounded_to_the_nearest_ties_to_even(tmp_path: Path) -> None:
    bits = (0x3F80_0000 + 0x2000 * np.arange(16)).astype(np.uint32)  # eighths of a step
    table = np.concatenate([bits.view(np.float32), -bits.view(np.float32)]).reshape(4, 8)
    table[0, 0], table[3, 7] = 3e38, -np.float32(1e-40)
    _, index = stored(tmp_path, "embedding.weight", table, offset=3)
    binding = Binding(
        name="weight", direction="in", shape=(4, 8), dtype="bfloat16", weight="weight"
    )
    record = record_with("embedding", binding)
    weights, device = RankWeights(record, index, index, layers=1, rank=0), FakeDevice()
    weights.load(device, staging=SMALL)
    found = on_device(device, weights.addresses(record.graphs[0])["weight"], binding)
    low = table.view(np.uint32) & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & ((table.view(np.uint32) >> 16) & 1 == 1))
    wanted = ((table.view(np.uint32) >> 16) + up).astype(np.uint16)
    assert (found.view(np.uint16) == wanted).all()
    assert weights.bytes_read == table.nbytes == 2 * weights.nbytes


def stored(
    folder: Path, name: str, array: NDArray[Any], *, offset: int
) -> tuple[Weight, WeightIndex]:
    """Write a tensor at any offset, as released files have them."""
    (folder / "weights").write_bytes(bytes(offset) + array.tobytes())
    dtype: Any = array.dtype.name
    weight = Weight(name=name, file="weights", offset=offset, dtype=dtype, shape=array.shape)
    return weight, WeightIndex(
        root=folder, weights={name: weight}, files={"weights": offset + array.nbytes}
    )


def record_with(kind: GraphKind, binding: Binding, ranks: int = 1) -> TrtRecord:
    graph = GraphRecord(kind=kind, phase="decode", file="", bindings=(binding,), nodes={})
    record = record_for(load_golden("tiny").config, Sizes())
    return dataclasses.replace(record, sizes=Sizes(tensor_parallel=ranks), graphs=(graph,))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_cut_of_any_shape_goes_through_any_staging(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 3]))
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cut = data.draw(st.none() | st.integers(0, len(shape) - 1))
    whole = tuple(n * ranks if axis == cut else n for axis, n in enumerate(shape))
    dtype = data.draw(st.sampled_from([np.int8, ml_dtypes.bfloat16, np.float32]))
    count = int(np.prod(whole))
    array = np.arange(count).astype(dtype).reshape(whole)
    folder = tmp_path_factory.mktemp("weights")
    _, index = stored(folder, "x", array, offset=data.draw(st.integers(0, 5)))
    staging = data.draw(st.integers(4, 64))
    parts = []
    for rank in range(ranks):
        binding = Binding(
            name="x",
            direction="in",
            shape=tuple(shape),
            dtype=np.dtype(dtype).name,
            weight="x",
            cut=cut,
        )
        record = record_with("head", binding, ranks)
        device = FakeDevice()
        weights = RankWeights(record, index, index, layers=0, rank=rank)
        weights.load(device, staging=staging)
        parts.append(on_device(device, weights.addresses(record.graphs[0])["x"], binding))
    found = parts[0] if cut is None else np.concatenate(parts, axis=cut)
    assert found.tobytes() == array.tobytes()


@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), limit=st.integers(1, 50))
def test_blocks_are_the_array_in_order_and_none_is_longer_than_the_limit(
    shape: list[int], limit: int
) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    blocks = [*_blocks(array, limit)]
    assert all(block.base is not None and block.size <= limit for block in blocks)
    assert (np.concatenate([block.reshape(-1) for block in blocks]) == array.reshape(-1)).all()


def test_no_more_than_the_staging_is_ever_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_golden("tiny8")
    record = record_for(golden.config, Sizes(tensor_parallel=4), "bfloat16")
    device = FakeDevice()
    sent: list[int] = []
    upload = device.upload

    def watched(address: int, source: NDArray[Any]) -> None:
        base = source
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert base is staging[0]
        sent.append(source.nbytes)
        upload(address, source)

    staging: list[NDArray[np.uint8]] = []

    def host_memory(nbytes: int) -> NDArray[np.uint8]:
        staging.append(np.zeros(nbytes, np.uint8))
        return staging[-1]

    monkeypatch.setattr(device, "upload", watched)
    monkeypatch.setattr(device, "host_memory", host_memory)
    weights = weights_of(record, golden.index, golden.config, 3)
    weights.load(device, staging=1000)
    assert len(staging) == 1
    assert max(sent) <= 1000
    assert sum(sent) == weights.nbytes


def test_all_that_does_not_fit_the_plans_is_named_at_once() -> None:
    golden = load_golden("tiny")
    weights = dict(golden.index.weights)
    del weights["layers.1.router.weight"]
    query = weights["layers.0.attention.query.weight"]
    weights[query.name] = dataclasses.replace(query, shape=(query.shape[0] * 2, 48))
    scales = weights["layers.1.experts.up.scales"]
    weights[scales.name] = dataclasses.replace(scales, dtype="float16")
    index = dataclasses.replace(golden.index, weights=weights)
    with pytest.raises(BundleError) as error:
        weights_of(record_for(golden.config, Sizes()), index, golden.config)
    _, *lines = str(error.value).splitlines()
    assert sorted(line.strip() for line in lines) == [
        "layers.0.attention.query.weight is int8 [192, 48]; the plans take int8 [96, 96]",
        "layers.1.experts.up.scales is float16 [8, 1, 256]; the plans take bfloat16 [8, 1, 256]",
        "layers.1.router.weight is missing",
    ]


def test_weights_of_another_number_of_ranks_do_not_fit() -> None:
    golden = load_golden("tiny8")
    record = record_for(golden.config, Sizes(tensor_parallel=4))
    other = dataclasses.replace(record, sizes=Sizes(tensor_parallel=2))
    with pytest.raises(BundleError, match=r"query.weight is int8 \[128, 128\]; .* \[128, 64\]"):
        weights_of(other, golden.index, golden.config)


def test_a_weight_file_that_was_cut_is_named(tmp_path: Path) -> None:
    _, index = stored(tmp_path, "x", np.zeros((4, 4), np.int8), offset=0)
    (tmp_path / "weights").write_bytes(bytes(10))
    binding = Binding(name="x", direction="in", shape=(4, 4), dtype="int8", weight="x")
    weights = RankWeights(record_with("head", binding), index, index, layers=0, rank=0)
    with pytest.raises(CheckpointError, match="the file was cut"):
        weights.load(FakeDevice())


def test_a_share_of_the_whole_is_the_whole() -> None:
    golden = load_golden("tiny")
    weight = golden.index["embedding.weight"]
    whole = WeightReader(golden.index.root).read(weight)
    share = Share(
        root=golden.index.root, weight=weight, cut=None, shape=weight.shape, dtype="float32"
    )
    assert part_of(whole, share.cut, 0, 1) is whole
    assert share.nbytes == whole.nbytes
