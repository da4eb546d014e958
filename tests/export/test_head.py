"""An int8 head is the table to half a step of every entry's scale, and needs its bundle only."""

import dataclasses
import itertools
import math
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from hypothesis.extra.numpy import arrays as arrays_of
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from export_grok.artifacts import HEAD_WEIGHTS, Bundle, graph_file, open_bundle
from export_grok.config import (
    DTYPES,
    GROK_1,
    HEAD_DTYPES,
    Dtype,
    ExportOptions,
    GrokConfig,
    HeadDtype,
)
from export_grok.engines.ort.build import build_engine
from export_grok.errors import BundleError, CheckpointError
from export_grok.export import graph_folder, head
from export_grok.export.contract import GraphKind, ports
from export_grok.export.graph_folder import export_graphs
from export_grok.export.graphs import stamped, write_graph
from export_grok.export.head import head_error, head_index, quantised, write_head
from export_grok.export.load import tensor_from_array
from export_grok.export.model import Head
from export_grok.export.parameters import head_parameters
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.export.trace import template_from_config
from export_grok.plugins.kernels import native_kernels
from export_grok.weights import NUMPY_DTYPES, Weight, WeightIndex, WeightReader
from tests.bundles import hashes, traced
from tests.conftest import load_golden

Floats = NDArray[np.float32]

HEADS: tuple[GraphKind, ...] = ("head", "head_all")

# 501 entries: neither codes nor scales end where the next tensor may begin.
CONFIG = dataclasses.replace(load_golden("tiny").config, vocab_size=501, num_layers=1)

quick = settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def written_table(table: Floats, norm: Floats, folder: Path) -> tuple[GrokConfig, WeightIndex]:
    """Write what a head is made of, at odd places as in the released files."""
    folder.mkdir(exist_ok=True)
    (folder / "file").write_bytes(b"odd" + table.tobytes() + norm.tobytes())
    weights = [
        Weight(name=name, file="file", offset=offset, dtype="float32", shape=array.shape)
        for name, offset, array in (
            ("embedding.weight", 3, table),
            ("final_norm.scale", 3 + table.nbytes, norm),
        )
    ]
    index = WeightIndex(
        root=folder,
        weights={weight.name: weight for weight in weights},
        files={"file": (folder / "file").stat().st_size},
    )
    vocabulary, width = table.shape
    return dataclasses.replace(CONFIG, vocab_size=vocabulary, emb_size=width), index


def read(index: WeightIndex) -> dict[str, NDArray[Any]]:
    reader = WeightReader(index.root)
    return {weight.name: reader.read(weight) for weight in index}


def normal(vocabulary: int, width: int) -> Floats:
    """Return a table of entries of different lengths, one of them of zeros."""
    random = np.random.default_rng(vocabulary)
    lengths = np.exp(random.normal(size=(vocabulary, 1)))
    table = (lengths * random.normal(size=(vocabulary, width))).astype(np.float32)
    table[vocabulary // 2] = 0
    return table


# ---- codes and scales

tables = arrays_of(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-(2.0**120), 2.0**120, width=32),
)


@quick
@given(table=tables)
def test_no_weight_is_off_by_more_than_half_its_scale(table: Floats) -> None:
    codes, scales = quantised(table)
    assert (codes.dtype, scales.dtype) == (np.dtype(np.int8), np.dtype(np.float32))
    assert codes.shape == table.T.shape
    assert np.abs(codes.astype(int)).max() <= 127
    error = np.abs(table.astype(np.float64) - codes.T * scales.astype(np.float64)[:, np.newaxis])
    # A quotient is rounded to float32 before it is rounded to a whole number.
    assert (error.max(axis=1) <= scales * (0.5 + 127 * 2.0**-24)).all()


@quick
@given(table=tables)
def test_a_scale_is_the_least_that_cuts_nothing_off(table: Floats) -> None:
    _, scales = quantised(table)
    exact = np.abs(table.astype(np.float64)).max(axis=1) / 127
    assert (scales >= exact).all()
    assert (np.nextafter(scales, np.float32(-1)) < exact)[scales > 0].all()
    assert (exact[scales == 0] == 0).all()


@quick
@given(
    codes=arrays_of(
        np.int8, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.integers(-127, 127)
    ),
    data=st.data(),
)
def test_a_table_that_is_codes_times_scales_comes_back(
    codes: NDArray[np.int8], data: st.DataObject
) -> None:
    entries, width = codes.shape
    for entry in codes:  # an entry's scale is that of its largest weight
        entry[data.draw(st.integers(0, width - 1))] = data.draw(st.sampled_from([-127, 127]))
    scales = data.draw(
        arrays_of(np.float32, entries, elements=st.floats(2.0**-100, 2.0**100, width=32))
    )
    found, found_scales = quantised(codes * scales[:, np.newaxis])
    np.testing.assert_array_equal(found, codes.T)
    np.testing.assert_allclose(found_scales, scales, rtol=2**-22)


def test_ties_go_to_the_even_number() -> None:
    table = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32)
    codes, scales = quantised(table)
    assert scales.tolist() == [1]
    assert codes[:, 0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_table_with_what_is_no_number_is_refused_with_its_token(
    bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "ENTRIES", 4)
    table = normal(10, 8)
    table[6, 3] = bad
    config, index = written_table(table, table[0], tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"row of token 6: .* use --head float32"):
        write_head(config, index, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


# ---- the file


@pytest.mark.parametrize("shape", [(1, 1), (37, 5), (64, 16), (501, 96)])
@pytest.mark.parametrize("entries", [1, 7, 64, 4096])
def test_the_file_is_that_of_the_whole_table_however_it_is_cut(
    shape: tuple[int, int], entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "ENTRIES", entries)
    table, norm = normal(*shape), np.arange(shape[1], dtype=np.float32)
    config, index = written_table(table, norm, tmp_path / "weights")
    found = write_head(config, index, tmp_path)
    assert found == head_index(config, tmp_path)
    assert found.files == {HEAD_WEIGHTS: (tmp_path / HEAD_WEIGHTS).stat().st_size}
    codes, scales = quantised(table)
    values = read(found)
    np.testing.assert_array_equal(values["unembedding.weight"], codes)
    np.testing.assert_array_equal(values["unembedding.scales"], scales[np.newaxis])
    np.testing.assert_array_equal(values["final_norm.scale"], norm)


@quick
@given(vocabulary=st.integers(1, 300), width=st.integers(1, 150).map(lambda n: 2 * n))
def test_tensors_begin_at_multiples_of_64_bytes_and_do_not_overlap(
    vocabulary: int, width: int
) -> None:
    config = dataclasses.replace(CONFIG, vocab_size=vocabulary, emb_size=width)
    index = head_index(config, Path())
    assert index.weights.keys() == head_parameters(config).keys()
    ends = sorted((weight.offset, weight.offset + weight.nbytes) for weight in index)
    assert all(offset % 64 == 0 for offset, _ in ends)
    assert all(end <= offset for (_, end), (offset, _) in itertools.pairwise(ends))
    assert index.files == {HEAD_WEIGHTS: ends[-1][1]}


def test_memory_is_that_of_one_block_whatever_the_vocabulary(tmp_path: Path) -> None:
    """The table is a hole of 268 MB in a file; its codes alone would take 67 MB."""
    vocabulary, width = 16 * head.ENTRIES, 1024
    weight = Weight(
        name="embedding.weight", file="table", offset=0, dtype="float32", shape=(vocabulary, width)
    )
    norm = dataclasses.replace(weight, name="final_norm.scale", shape=(width,))
    with (tmp_path / "table").open("wb") as file:
        file.truncate(weight.nbytes)
    index = WeightIndex(
        root=tmp_path,
        weights={weight.name: weight, norm.name: norm},
        files={"table": weight.nbytes},
    )
    config = dataclasses.replace(CONFIG, vocab_size=vocabulary, emb_size=width)
    tracemalloc.start()
    try:
        found = write_head(config, index, tmp_path)
        assert head_error(index, found).largest == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (
        peak < 16 * head.ENTRIES * width
    )  # two blocks of the table, their codes, and theirs again


def test_the_error_is_that_of_the_whole_matrix_and_of_its_worst_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "ENTRIES", 10)
    table = normal(64, 24)
    table[17] = 1e-3
    table[17, 5] = 1  # beside which all others are next to nothing
    config, index = written_table(table, table[0], tmp_path / "weights")
    found = write_head(config, index, tmp_path)
    values = read(found)
    error = table - values["unembedding.weight"].T * values["unembedding.scales"].T.astype(float)
    told = head_error(index, found)
    assert told.relative == pytest.approx(np.linalg.norm(error) / np.linalg.norm(table), rel=1e-5)
    by_entry = np.linalg.norm(error, axis=1)[table.any(axis=1)]
    by_entry /= np.linalg.norm(table, axis=1)[table.any(axis=1)]
    assert told.largest == pytest.approx(by_entry.max(), rel=1e-5)
    assert told.relative < told.largest


def test_a_table_of_zeros_has_no_error(tmp_path: Path) -> None:
    config, index = written_table(np.zeros((5, 4), np.float32), np.ones(4, np.float32), tmp_path)
    told = head_error(index, write_head(config, index, tmp_path))
    assert (told.relative, told.largest) == (0, 0)


# ---- the graphs


@pytest.mark.parametrize(
    ("kind", "dtype"), [("head", "float32"), *(("head_all", dtype) for dtype in DTYPES)]
)
def test_a_template_is_the_op_with_the_heads_weights_as_inputs(
    kind: GraphKind, dtype: Dtype
) -> None:
    model = traced(kind, CONFIG, dtype, "int8")
    assert [node.op_type for node in model.graph if node.domain == "grok1"] == ["GrokInt8Linear"]
    assert "MatMul" not in {node.op_type for node in model.graph}
    onnx.checker.check_model(ir.serde.serialize_model(model), full_check=True)
    known = {row.name for row in ports(kind, CONFIG, dtype)}
    names = {"FLOAT": "float32", "INT8": "int8"}
    found = {
        str(value.name): (tuple(value.shape or ()), names[str(value.dtype)])
        for value in model.graph.inputs
        if value.name not in known
    }
    assert found == {name: (p.shape, p.dtype) for name, p in head_parameters(CONFIG).items()}


def test_a_head_of_full_size_is_traced_without_its_memory() -> None:
    model = template_from_config("head", GROK_1, "bfloat16", "int8")
    assert len(ir.serde.serialize_model(model).SerializeToString()) < 20_000


@pytest.mark.parametrize("kind", ["embedding", "layer"])
def test_other_graphs_are_the_same_with_any_head(kind: GraphKind) -> None:
    plain, other = (
        ir.serde.serialize_model(template_from_config(kind, CONFIG, "float32", chosen))
        for chosen in HEAD_DTYPES
    )
    assert plain == other


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """Return an engine with an int8 head whose other weights lie in the checkpoint."""
    folder = tmp_path_factory.mktemp("int8_head")
    write_random_checkpoint(CONFIG, folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_folder, "template_from_config", traced)
        graphs = export_graphs(
            folder / "checkpoint", folder / "bundle", ExportOptions(head="int8")
        )
        yield build_engine(graphs)


def session(path: Path, root: Path, library: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if library is not None:
        options.register_custom_ops_library(str(library))
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(root)
    )
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def exact_logits(h: Floats, weights: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return what the int8 head must give, in float64, from weights of the names of its graphs."""
    x = h.astype(np.float64)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)
    x *= weights["final_norm.scale"]
    matrix = weights["unembedding.weight"] * weights["unembedding.scales"].astype(np.float64)
    logits: NDArray[np.float64] = x @ matrix * np.float32(CONFIG.output_multiplier_scale)
    return logits


def streams(batch: int, tokens: int) -> Floats:
    random = np.random.default_rng(tokens)
    return 3 * random.standard_normal((batch, tokens, CONFIG.emb_size), np.float32)


# Sums of 96 products in float32; with many rows native kernels may round these to 16 bits.
@pytest.mark.parametrize(
    ("variant", "native", "tolerance"), [("", False, 2e-6), ("ort", False, 2e-6), ("", True, 5e-5)]
)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (2, 9)])
def test_logits_are_those_of_the_dequantised_table(
    variant: str, native: bool, tolerance: float, batch: int, tokens: int, bundle: Bundle
) -> None:
    library = native_kernels().library if native else None
    if native and library is None:
        pytest.skip(native_kernels().reason)
    h = streams(batch, tokens)
    last = np.arange(batch, dtype=np.int64) % tokens
    exact = exact_logits(h, read(head_index(CONFIG, bundle.folder)))
    wanted = {"head": exact[np.arange(batch), last], "head_all": exact}
    for kind, inputs in (("head", {"h": h, "last": last}), ("head_all", {"h": h})):
        path = bundle.folder / graph_file(kind, variant=variant)
        (logits,) = session(path, bundle.head_root, library).run(["logits"], inputs)
        assert logits.dtype == np.float32
        largest = np.abs(exact).max()
        np.testing.assert_allclose(logits, wanted[kind], atol=tolerance * largest, rtol=0)


def test_the_int8_head_is_near_the_float_head(bundle: Bundle) -> None:
    """By as much as the manifest says of the matrix, for entries that do not know the input."""
    h = streams(4, 25)
    table = read(bundle.index())["embedding.weight"].astype(np.float64)
    weights = read(head_index(CONFIG, bundle.folder))
    ours = exact_logits(h, weights)
    weights |= {"unembedding.weight": table.T, "unembedding.scales": np.ones((1, 501))}
    exact = exact_logits(h, weights)
    error = bundle.manifest.head_error
    assert error is not None
    assert 0.003 < error.relative <= error.largest < 0.02
    relative = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
    assert relative == pytest.approx(error.relative, rel=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_round_as_the_module_does(
    dtype: Dtype, bundle: Bundle, tmp_path: Path
) -> None:
    index = head_index(CONFIG, bundle.folder)
    kind: GraphKind = "head_all"
    model = stamped(traced(kind, CONFIG, dtype, "int8"), kind, CONFIG, dtype, index)
    shutil.copy(bundle.folder / HEAD_WEIGHTS, tmp_path)
    write_graph(model, tmp_path / "head.onnx")
    h = streams(2, 3).astype(NUMPY_DTYPES[dtype])
    logits: Any = ReferenceEvaluator(str(tmp_path / "head.onnx")).run(None, {"h": h})
    module = Head(CONFIG, dtype, None)
    module.load_state_dict({name: tensor_from_array(array) for name, array in read(index).items()})
    expected = module(tensor_from_array(h)).numpy()
    np.testing.assert_allclose(logits[0], expected, rtol=2**-7, atol=2**-7)


# ---- the bundle


def test_head_graphs_point_into_the_bundle_only(bundle: Bundle) -> None:
    assert bundle.head_root == bundle.folder != bundle.weights_root
    for kind in HEADS:
        for variant in ("", "ort"):
            path = bundle.folder / graph_file(kind, variant=variant)
            stored = onnx.load(path, load_external_data=False).graph.initializer
            places = [
                {entry.key: entry.value for entry in tensor.external_data}
                for tensor in stored
                if tensor.data_location == onnx.TensorProto.EXTERNAL
            ]
            assert {place["location"] for place in places} == {HEAD_WEIGHTS}
            assert len(places) == 3


def test_a_moved_bundle_keeps_its_head_without_the_checkpoint(
    bundle: Bundle, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(bundle.folder, tmp_path / "far" / "away"))
    h = streams(1, 2)
    for kind in ("head_all.onnx", "head_all.ort.onnx"):
        (before,) = session(bundle.folder / kind, bundle.head_root).run(None, {"h": h})
        (after,) = session(moved / kind, moved).run(None, {"h": h})
        np.testing.assert_array_equal(after, before)
    opened = open_bundle(moved, weights_root=bundle.weights_root)
    assert (opened.head_root, opened.weights_root) == (moved, bundle.weights_root)


def test_the_head_of_a_bundle_is_held_to_its_manifest(bundle: Bundle, tmp_path: Path) -> None:
    assert bundle.manifest.head == "int8"
    moved = Path(shutil.copytree(bundle.folder, tmp_path / "moved"))
    data = bytearray((moved / HEAD_WEIGHTS).read_bytes())
    data[-1] ^= 1
    (moved / HEAD_WEIGHTS).write_bytes(data)
    with pytest.raises(BundleError, match=f"{HEAD_WEIGHTS} has changed since"):
        open_bundle(moved, weights_root=bundle.weights_root)


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.fixture
def export(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Bundle]:
    """Return what exports the bundle's checkpoint to a folder of this test."""
    monkeypatch.setattr(graph_folder, "template_from_config", traced)

    def export(name: str, **options: Any) -> Bundle:
        return export_graphs(bundle.weights_root, tmp_path / name, ExportOptions(**options))

    return export


def test_a_bundle_with_the_other_head_is_replaced_only_when_asked(
    export: Callable[..., Bundle],
) -> None:
    heads: tuple[HeadDtype, ...] = ("int8", "float32")
    fresh = {chosen: hashes(export(chosen, head=chosen).folder) for chosen in heads}
    assert fresh["int8"].keys() - fresh["float32"].keys() == {HEAD_WEIGHTS}
    for old, new in (heads, heads[::-1]):  # each folder gets the head that it has not
        out = export(old, head=old).folder
        before = times(out)
        with pytest.raises(BundleError, match="--overwrite"):
            export(old, head=new)
        assert times(out) == before
        replaced = export(old, head=new, overwrite=True)
        assert hashes(out) == fresh[new]
        assert replaced.head_root == (out if new == "int8" else replaced.weights_root)


def test_copied_weights_and_the_head_lie_in_one_bundle(
    export: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = export("out", head="int8", copy_weights=True)
    assert bundle.head_root == bundle.weights_root == bundle.folder
    assert HEAD_WEIGHTS in bundle.manifest.files
    assert all(file.startswith("weights/") for file in bundle.manifest.weight_files)
    referring = export("referring", head="int8")
    for name in ("head.onnx", "head_all.onnx", HEAD_WEIGHTS):
        assert hashes(bundle.folder)[name] == hashes(referring.folder)[name]


def test_a_head_that_cannot_be_leaves_no_folder(
    export: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise CheckpointError("the table holds nan")

    monkeypatch.setattr(graph_folder, "write_head", refuse)
    with pytest.raises(CheckpointError):
        export("out", head="int8")
    assert not (tmp_path / "out").exists()
