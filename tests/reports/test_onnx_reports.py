"""What others reported of ONNX export and ONNX Runtime does not happen here.

docs/reliability.md says which report each test is of, and which tests elsewhere are of others.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from export_grok.artifacts import Bundle, open_bundle
from export_grok.config import GROK_1, ExportOptions
from export_grok.engines.backend import open_session
from export_grok.engines.pipeline import engine_from_source
from export_grok.errors import BundleError
from export_grok.export.graph_folder import export_graphs
from export_grok.export.open_source import open_source
from export_grok.export.store.folder import store_plan
from tests.bundles import BundleOf, bundle_of, checkpoint_copy, graphs_changed, traced, traced_once
from tests.commands.conftest import Refused, refused, run
from tests.conftest import DATA
from tests.documents import ROOT, blocks
from tests.engines.ort.conftest import VARIANTS, builtin, kernels, native
from tests.reports.peak import peak_memory
from tests.reports.sparse import sparse_checkpoint

__all__ = ["builtin", "bundle_of", "kernels", "native", "refused", "run", "traced_once"]

DOCUMENT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")

LAYERS = 4
GRAPHS = "export_grok.export.graph_folder.template_from_config"


@dataclass(frozen=True)
class FullSize:
    """A checkpoint of full size, with the graphs of its first layer beside it.

    Attributes:
        folder: 4 layers in 23 GB; on the disk they are holes.
        peak: bytes of memory that writing the graphs took.
    """

    folder: Path
    peak: int


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> FullSize:
    config = dataclasses.replace(GROK_1, num_layers=LAYERS)
    folder = sparse_checkpoint(config, tmp_path_factory.mktemp("full_size") / "checkpoint")
    return FullSize(folder, peak_of_export(folder, folder, 1))


def peak_of_export(checkpoint: Path, out: Path, layers: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRAPHS, traced)
        return peak_memory(lambda: export_graphs(checkpoint, out, ExportOptions(layers=layers)))


def test_a_layer_of_more_than_2_gib_is_written_beside_its_weights_and_passes_the_checker(
    full_size: FullSize,
) -> None:
    path = full_size.folder / "layer_00.onnx"
    assert path.stat().st_size < 1_000_000
    stored = onnx.load(path, load_external_data=False).graph.initializer
    entries = [entry for tensor in stored for entry in tensor.external_data]
    assert sum(int(entry.value) for entry in entries if entry.key == "length") > 2 * 2**31
    onnx.checker.check_model(str(path), full_check=True)


def test_export_takes_no_more_memory_for_more_layers_and_much_less_than_one_of_them(
    full_size: FullSize, tmp_path: Path
) -> None:
    assert peak_memory(lambda: np.ones(10_000_000)) > 70_000_000  # or it would see nothing
    assert full_size.peak < 1_000_000_000  # a layer has 4.9 GB of weights
    few, many = (
        peak_of_export(full_size.folder, tmp_path / f"{layers}", layers) for layers in (1, LAYERS)
    )
    assert many < few + 20_000_000


def test_tensors_of_a_store_begin_at_pages_so_that_they_can_be_mapped(full_size: FullSize) -> None:
    weights = [
        weight
        for file in store_plan(open_source(full_size.folder))
        for weight in file.weights.values()
    ]
    assert len(weights) == 2 + LAYERS * 19
    apart = {weight.name.split(".", 2)[2] for weight in weights if weight.offset % 4096}
    assert apart <= {"attention.key.scales", "attention.value.scales"}  # of 2 KB, at the end


def answer(bundle: Bundle) -> Any:
    session = open_session(bundle, batch=1, max_length=4, threads=1)
    return session.forward_all(np.array([[5, 7]]), np.zeros(1, np.int64))


@pytest.mark.usefixtures("traced_once")
def test_a_bundle_and_its_checkpoint_load_behind_links_and_when_moved_together(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    expected = answer(bundle_of("tiny"))
    disk = tmp_path / "disk"
    checkpoint_copy("tiny", disk / "checkpoint")
    (tmp_path / "link").symlink_to(disk / "checkpoint")
    engine_from_source(tmp_path / "link", disk / "bundles" / "tiny", backend="ort")
    disk.rename(tmp_path / "moved")
    (tmp_path / "way").symlink_to(tmp_path / "moved" / "bundles" / "tiny")
    bundle = open_bundle(tmp_path / "way")
    np.testing.assert_array_equal(answer(bundle), expected)


@pytest.mark.parametrize(
    "place", ["../../../../../../../../etc/passwd", "/etc/passwd", "ckpt-0/../../outside"]
)
def test_a_graph_that_points_out_of_its_folder_is_refused(
    place: str, kernels: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("tiny")

    def lead_out(model: ir.Model) -> None:
        value = model.graph.initializers["pre_attn_norm.scale"]
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        value.const_value = ir.ExternalTensor(
            place, 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=str(value.name)
        )

    wrong = graphs_changed(bundle, tmp_path / "wrong", lead_out, variant=VARIANTS[kernels])
    with pytest.raises(BundleError, match="External data path validation failed") as error:
        answer(wrong)
    assert str(tmp_path / "wrong" / "layer_00.") in str(error.value)


@pytest.mark.parametrize("command", ["verify", "generate", "build-engine"])
def test_a_bfloat16_export_says_on_a_cpu_which_flag_to_use(
    command: str, bfloat16: Path, refused: Refused
) -> None:
    prompt = ["--prompt", "a"] if command == "generate" else []
    code = 1 if command == "build-engine" else 2
    said = refused(command, bfloat16, *prompt, code=code)
    assert "--dtype float32" in said
    assert "NOT_IMPLEMENTED" not in said


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return graphs of a fixture model in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16") / "graphs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRAPHS, traced)
        export_graphs(DATA / "tiny", folder, ExportOptions(dtype="bfloat16"))
    return folder


def test_plain_onnx_runtime_loads_a_layer_by_the_lines_of_the_document(
    bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No library of ours is registered: the ops run by the functions in the file."""
    bundle = bundle_of("tiny")
    (tmp_path / "engine").symlink_to(bundle.folder)
    (tmp_path / "demo").symlink_to(bundle.weights_root)
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks(DOCUMENT) if block.language == "python"]
    names: dict[str, Any] = {}
    exec(block.text, names)
    assert [value.name for value in names["layer"].get_outputs()] == ["h_out", "k_out", "v_out"]
    with pytest.raises(Exception, match="External data path does not exist"):
        onnxruntime.InferenceSession("engine/layer_00.onnx")
