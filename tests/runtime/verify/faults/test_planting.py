"""A wrong copy is whole, wrong in one place, marked, and not made where it means nothing."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from export_grok.artifacts import MANIFEST, Bundle, graph_file, open_bundle
from export_grok.config import ExportOptions, GrokConfig
from export_grok.engines.backend import engine_summary, open_probe
from export_grok.engines.ort.session import open_engine
from export_grok.engines.pipeline import engine_from_source
from export_grok.engines.probe import GraphName
from export_grok.errors import BuildError, BundleError, ConfigError, OutputError
from export_grok.export.contract import check_contract
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.planting import PLANTED, plant_fault, why_not
from tests.bundles import BundleOf, hashes
from tests.conftest import load_golden
from tests.engines.ort.logits import TOLERANCE, distance
from tests.runtime.verify.faults.conftest import MODELS, FeedOf, RanksOf

LAYER_1 = {"layer_01.onnx", "layer_01.ort.onnx"}


def changed(bundle: Bundle, copy: Bundle) -> set[str]:
    """Return the files of a copy that are not those of the bundle; the manifest aside."""
    before, after = hashes(bundle.folder), hashes(copy.folder)
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]} - {MANIFEST}


@pytest.mark.parametrize(
    ("name", "layer", "files"),
    [
        ("silu_for_gelu", None, LAYER_1),
        ("silu_for_gelu", 2, {"layer_02.onnx", "layer_02.ort.onnx"}),
        ("eps_1e_6", 0, {"layer_00.onnx", "layer_00.ort.onnx"}),
        ("swapped_layers", None, LAYER_1),
        ("embedding_multiplier_missing", None, {"embedding.onnx", "embedding.ort.onnx"}),
        (
            "output_multiplier_missing",
            None,
            {f"{head}{variant}.onnx" for head in ("head", "head_all") for variant in ("", ".ort")},
        ),
    ],
)
def test_only_the_graphs_with_the_fault_differ(
    name: str, layer: int | None, files: set[str], bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("tiny8")
    before = hashes(bundle.folder)
    copy = plant_fault(bundle, FAULTS[name], tmp_path / "copy", layer=layer)
    assert changed(bundle, copy) == files
    assert hashes(bundle.folder) == before
    assert copy.weights_root == bundle.weights_root


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.plant])
def test_a_graph_with_a_fault_keeps_the_contract(
    name: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle, fault = bundle_of(MODELS.get(name, "tiny8")), FAULTS[name]
    copy = plant_fault(bundle, fault, tmp_path / "copy")
    layer = copy.manifest.engine[PLANTED]["layer"]
    for variant in ("", "ort"):
        model = ir.load(copy.folder / graph_file(fault.graph, layer, variant=variant))
        check_contract(model, fault.graph, bundle.config, "float32", weights=False)


@pytest.mark.parametrize("kernels", ["native", "builtin"])
@pytest.mark.parametrize("name", ["stale_cache_slot", "a_slot_too_far", "two_experts_exchanged"])
def test_a_wrong_copy_runs_as_a_session(
    kernels: str, name: str, bundle_of: BundleOf, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(kernels)
    copy = plant_fault(bundle_of("tiny8"), FAULTS[name], tmp_path / "copy")
    golden = load_golden("tiny8")
    session = open_engine(copy, batch=2, max_length=golden.config.sequence_len)
    # A slot too far is overwritten by the token that belongs there: logits do not tell.
    assert (distance(session, golden) > TOLERANCE) == (name != "a_slot_too_far")


def test_a_wrong_copy_says_so_and_is_taken_for_no_other(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("tiny8")
    copy = plant_fault(bundle, FAULTS["exact_gelu"], tmp_path / "copy")
    assert copy.manifest.engine == {PLANTED: {"name": "exact_gelu", "layer": 1}}
    assert engine_summary(copy) == engine_summary(bundle)
    again = plant_refused(copy, "cap_of_20", tmp_path)
    assert "it is wrong already: exact_gelu was planted in it" in again
    before = hashes(copy.folder)
    with pytest.raises(BundleError, match="a bundle of another model, option or version"):
        engine_from_source(bundle.weights_root, copy.folder, backend="ort")
    assert hashes(copy.folder) == before


def test_both_may_be_moved_together(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundle = bundle_of("tiny8")
    shutil.copytree(bundle.weights_root, tmp_path / "a" / "weights")
    shutil.copytree(bundle.folder, tmp_path / "a" / "bundle")
    here = open_bundle(tmp_path / "a" / "bundle", weights_root=tmp_path / "a" / "weights")
    plant_fault(here, FAULTS["exact_gelu"], tmp_path / "a" / "deep" / "copy")
    (tmp_path / "a").rename(tmp_path / "b")
    moved = open_bundle(tmp_path / "b" / "deep" / "copy")
    assert moved.weights_root == tmp_path / "b" / "weights"


@pytest.mark.usefixtures("traced_once")
def test_weights_that_are_in_the_bundle_and_its_own_head_are_found(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    whole = engine_from_source(
        load_golden("tiny8").folder,
        tmp_path / "whole",
        backend="ort",
        options=ExportOptions(copy_weights=True, head="int8"),
    )
    copy = plant_fault(whole, FAULTS["output_multiplier_missing"], tmp_path / "copy")
    assert copy.weights_root == whole.folder
    assert not (copy.folder / "weights").exists()
    h = np.random.default_rng(0).standard_normal((1, 2, copy.config.emb_size), np.float32)
    found = []
    for bundle in (whole, copy):
        with open_probe(bundle).graph(GraphName(kind="head_all")) as run:
            found.append(run({"h": h})["logits"])
    factor = copy.config.output_multiplier_scale
    np.testing.assert_allclose(found[0], found[1] * factor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["wrong_slice", "sum_left_out"])
def test_ranks_make_mistakes_of_their_own(
    name: str, ranks_of: RanksOf, feed_of: FeedOf, tmp_path: Path
) -> None:
    bundle, feed, fault = ranks_of("tiny8", 2), feed_of("tiny8"), FAULTS[name]
    copy = plant_fault(bundle, fault, tmp_path / "copy")
    assert changed(bundle, copy) == {"rank_1/layer_01.weights"}
    assert copy.manifest.engine["tensor_parallel"] == 2
    graph = GraphName(kind="layer", layer=1)
    found = feed.outputs(open_probe(copy), graph)
    failed = feed.failed(graph, found, feed.right[graph])
    assert failed[0].tensor == fault.shows
    assert failed[0].ratio > 1000
    assert "those make mistakes of their own only" in plant_refused(bundle, "cap_of_20", tmp_path)


def plant_refused(bundle: Bundle, name: str, folder: Path, layer: int | None = None) -> str:
    """Have a fault refused, and return what is said; nothing may be left."""
    with pytest.raises(ConfigError) as caught:
        plant_fault(bundle, FAULTS[name], folder / "refused", layer=layer)
    assert not (folder / "refused").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "layer", "said"),
    [
        ("exact_gelu", 3, "layer is 3; this model has layers 0 to 2"),
        ("exact_gelu", -1, "layer is -1; this model has layers 0 to 2"),
        ("output_multiplier_missing", 0, "is a fault of the head; leave --layer away"),
        ("layers_in_numeric_order", None, "it has 3 layers, and this takes 11 or more"),
        ("root_of_head_size_for_multiplier", None, "1/sqrt(8) is its multiplier, 0.3535"),
        ("wrong_slice", None, "it is an engine of one rank"),
    ],
)
def test_what_is_no_fault_here_is_refused(
    name: str, layer: int | None, said: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    assert said in plant_refused(bundle_of("tiny8"), name, tmp_path, layer)


def test_a_layer_that_stays_where_it_is_is_refused(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundle, fault = bundle_of("deep13"), FAULTS["layers_in_numeric_order"]
    assert why_not(fault, bundle) is None
    text = plant_refused(bundle, fault.name, tmp_path, layer=1)
    assert "layer 1 has its own weights then too; choose another --layer" in text


def test_an_engine_of_another_backend_is_refused(bundle_of: BundleOf) -> None:
    bundle = bundle_of("tiny8")
    other = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, backend="trt")
    )
    assert why_not(FAULTS["exact_gelu"], other) == (
        "it holds a trt engine, and faults are planted in ort engines"
    )


def test_a_folder_that_holds_something_is_left_alone(bundle_of: BundleOf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="is not empty"):
        plant_fault(bundle_of("tiny8"), FAULTS["exact_gelu"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_was_begun_is_removed(bundle_of: BundleOf, tmp_path: Path) -> None:
    def broken(model: ir.Model, config: GrokConfig) -> None:
        raise BuildError("broken")

    fault = dataclasses.replace(FAULTS["exact_gelu"], plant=broken)
    with pytest.raises(BuildError, match="broken"):
        plant_fault(bundle_of("tiny8"), fault, tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_of_another_program_is_told(bundle_of: BundleOf, tmp_path: Path) -> None:
    def without_experts(model: ir.Model, config: GrokConfig) -> None:
        for node in model.graph:
            if node.op_type == "GrokMoeExperts":
                node.op_type = "Other"
        plant = FAULTS["exact_gelu"].plant
        assert plant is not None
        plant(model, config)

    fault = dataclasses.replace(FAULTS["exact_gelu"], plant=without_experts)
    with pytest.raises(BuildError, match="has 0 nodes where one was looked for, GrokMoeExperts"):
        plant_fault(bundle_of("tiny8"), fault, tmp_path / "copy")


def test_the_manifest_is_json_that_any_program_reads(bundle_of: BundleOf, tmp_path: Path) -> None:
    copy = plant_fault(bundle_of("tiny8"), FAULTS["output_multiplier_missing"], tmp_path / "copy")
    value = json.loads((copy.folder / MANIFEST).read_bytes())
    assert value["engine"][PLANTED] == {"name": "output_multiplier_missing", "layer": None}
    assert value["versions"]["export-grok"].endswith(" with output_multiplier_missing")
