"""The builder lowers all graphs of a folder or none, and says what the engine cannot run."""

import dataclasses
import json
import shutil
from pathlib import Path

import onnx
import pytest

from export_grok.artifacts import MANIFEST, Bundle, open_bundle, record_of, write_manifest
from export_grok.config import Dtype, EngineOptions, ExportOptions
from export_grok.engines.ort.build import build_engine
from export_grok.errors import BuildError, BundleError, ConfigError
from export_grok.export.graph_folder import export_graphs
from export_grok.export.plan import versions
from export_grok.plugins.kernels import CHOICE
from tests.bundles import BundleOf, hashes
from tests.conftest import DATA

pytestmark = pytest.mark.usefixtures("traced_once")


def own_copy(bundle: Bundle, folder: Path) -> Bundle:
    """Return a copy of a bundle, to be changed at will."""
    shutil.copytree(bundle.folder, folder)
    return open_bundle(folder, weights_root=bundle.weights_root)


def without_engine(bundle: Bundle) -> Bundle:
    """Take the engine out of a bundle and return the graphs that are left."""
    for path in bundle.folder.glob("*.ort.onnx"):
        path.unlink()
    files = {name: r for name, r in bundle.manifest.files.items() if ".ort." not in name}
    manifest = dataclasses.replace(
        bundle.manifest, kind="graphs", backend=None, files=files, lowering={}
    )
    write_manifest(bundle.folder, manifest)
    return dataclasses.replace(bundle, manifest=manifest)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_other_dtypes_are_refused_before_anything_is_written(tmp_path: Path, dtype: Dtype) -> None:
    graphs = export_graphs(DATA / "tiny", tmp_path / "out", ExportOptions(dtype=dtype))
    before = hashes(graphs.folder)
    for allow_functions in (False, True):
        with pytest.raises(BuildError, match=f"{dtype}.*--dtype float32") as error:
            build_engine(graphs, EngineOptions(allow_functions=allow_functions))
        assert "\n" not in str(error.value)
    assert hashes(graphs.folder) == before


@pytest.mark.parametrize("without", ["builtin", "no_library"])
def test_an_op_without_a_kernel_is_refused_before_anything_is_left_behind(
    without: str, request: pytest.FixtureRequest, bundle_of: BundleOf, tmp_path: Path
) -> None:
    request.getfixturevalue(without)
    graphs = without_engine(own_copy(bundle_of("deep13"), tmp_path / "out"))
    before = hashes(graphs.folder)
    with pytest.raises(
        BuildError, match=r"head_size is 4; the kernel takes a multiple of 8"
    ) as error:
        build_engine(graphs)
    assert "--allow-functions" in str(error.value)
    with pytest.raises(BuildError):  # a second try is no better
        build_engine(open_bundle(graphs.folder, weights_root=graphs.weights_root))
    assert hashes(graphs.folder) == before


@pytest.mark.parametrize(
    ("kernels", "allow"), [("native", False), ("native", True), ("builtin", True)]
)
def test_functions_that_are_allowed_or_needed_elsewhere_only_are_built_and_warned_of(
    kernels: str,
    allow: bool,
    request: pytest.FixtureRequest,
    bundle_of: BundleOf,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    request.getfixturevalue(kernels)
    shared = bundle_of("deep13")
    graphs = without_engine(own_copy(shared, tmp_path / "out"))
    caplog.clear()
    bundle = build_engine(graphs, EngineOptions(allow_functions=allow))
    where = ", where there are no native kernels" if kernels == "native" else ""
    assert [record.getMessage() for record in caplog.records] == [
        f"runs by its function body, slowly{where}: "
        "GrokSoftcapAttention: head_size is 4; the kernel takes a multiple of 8"
    ]
    assert hashes(bundle.folder) == hashes(shared.folder)
    assert bundle.manifest.lowering["GrokSoftcapAttention"] == {"lowered": 0, "function": 13}
    before = hashes(bundle.folder)
    assert build_engine(bundle, EngineOptions(allow_functions=allow)) is bundle  # made once
    assert hashes(bundle.folder) == before


@pytest.mark.usefixtures("builtin")
def test_an_engine_with_functions_is_refused_where_they_are_not_allowed(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = own_copy(bundle_of("deep13"), tmp_path / "out")
    before = hashes(bundle.folder)
    with pytest.raises(BuildError, match=r"--allow-functions"):
        build_engine(bundle)
    assert hashes(bundle.folder) == before
    assert build_engine(bundle, EngineOptions(allow_functions=True)) is bundle


@pytest.mark.usefixtures("native")
def test_an_engine_that_was_lowered_whole_is_built_without_a_warning(
    bundle_of: BundleOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = without_engine(own_copy(bundle_of("tiny"), tmp_path / "out"))
    caplog.clear()
    assert hashes(build_engine(graphs).folder) == hashes(bundle_of("tiny").folder)
    assert not caplog.records


@pytest.mark.usefixtures("no_library")
def test_native_kernels_that_are_asked_for_and_not_there_are_told_before_anything_is_written(
    bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = without_engine(own_copy(bundle_of("tiny"), tmp_path / "out"))
    before = hashes(graphs.folder)
    monkeypatch.setenv(CHOICE, "native")
    with pytest.raises(ConfigError, match=r"EXPORT_GROK_KERNELS is native, but .*compiler"):
        build_engine(graphs)
    assert hashes(graphs.folder) == before


def test_every_lowered_graph_stands_in_the_manifest(bundle_of: BundleOf) -> None:
    bundle = bundle_of("tiny8")
    lowered = {path.name for path in bundle.folder.glob("*.ort.onnx")}
    assert lowered == {name for name in bundle.manifest.files if ".ort." in name}
    assert len(lowered) == 3 + bundle.config.num_layers
    for name in lowered:
        assert bundle.manifest.files[name] == record_of(bundle.folder / name)


def test_the_manifest_says_which_runtime_made_the_engine(bundle_of: BundleOf) -> None:
    manifest = bundle_of("tiny").manifest
    assert manifest.backend == "ort"
    assert versions("onnxruntime").items() <= manifest.versions.items()
    assert {"export-grok", "torch", "onnx", "onnxscript"} <= manifest.versions.keys()


def test_an_engine_of_another_runtime_is_built_again(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundle = own_copy(bundle_of("tiny"), tmp_path / "out")
    assert build_engine(bundle) is bundle
    path = bundle.folder / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["versions"]["onnxruntime"] = "0.1"
    path.write_text(json.dumps(manifest))
    again = build_engine(open_bundle(bundle.folder, weights_root=bundle.weights_root))
    assert again.manifest == bundle.manifest
    assert json.loads(path.read_text())["versions"] == bundle.manifest.versions


@pytest.mark.parametrize("entry", ["dims", "location", "offset"])
def test_a_graph_that_points_at_other_weights_than_the_index_is_not_built(
    entry: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    graphs = without_engine(own_copy(bundle_of("tiny"), tmp_path / "out"))
    path = graphs.folder / "layer_01.onnx"
    model = onnx.load(path, load_external_data=False)
    (tensor,) = [t for t in model.graph.initializer if t.name == "attention.out.scales"]
    if entry == "dims":
        tensor.dims[0] = 2**31  # groups, each of which would be lowered for itself
    else:
        (place,) = [each for each in tensor.external_data if each.key == entry]
        place.value = {"location": "../outside", "offset": "1"}[entry]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError) as error:
        build_engine(graphs)
    assert str(error.value) == (
        f"{path} points at other weights than the index names (attention.out.scales); export it "
        "again"
    )
