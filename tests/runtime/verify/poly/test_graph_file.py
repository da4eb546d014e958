"""A graph is found by its file, and every file that is none says what to give instead."""

import shutil
from pathlib import Path

import pytest
from polygraphy.exception import PolygraphyException

from export_grok.artifacts import Bundle
from export_grok.engines.probe import GraphName
from export_grok.errors import BundleError
from export_grok.runtime.verify.poly.graph_file import GraphFile, plain_errors
from tests.bundles import BundleOf


def message(path: Path) -> str:
    """Return what is said of a file that is refused."""
    with pytest.raises(BundleError) as caught:
        GraphFile.at(path)
    return str(caught.value)


def test_every_graph_that_runs_is_found(bundle_of: BundleOf) -> None:
    folder = bundle_of("tiny").folder
    runs = [path for path in folder.glob("*.onnx") if "template" not in path.name]
    names = {
        GraphName(kind="embedding"),
        GraphName(kind="head"),
        GraphName(kind="head_all"),
        GraphName(kind="layer", layer=0),
        GraphName(kind="layer", layer=1),
    }
    found = [GraphFile.at(path) for path in runs]
    for variant in ("", "ort"):
        assert {file.graph for file in found if file.variant == variant} == names
    assert len(found) == 2 * len(names)


def test_a_template_names_the_graph_that_has_weights(bundle_of: BundleOf) -> None:
    folder = bundle_of("tiny").folder
    assert f"give {folder / 'layer_00.onnx'}" in message(folder / "layer.template.onnx")
    assert f"give {folder / 'head.onnx'}" in message(folder / "head.template.onnx")


def test_a_part_of_a_rank_names_the_whole_graph(of_ranks: Bundle) -> None:
    part = min((of_ranks.folder / "ranks").glob("layer_01.*.onnx"))
    assert f"{of_ranks.folder / 'layer_01.onnx'}, or" in message(part)
    assert f"export-grok verify {of_ranks.folder}" in message(part)


def test_what_is_not_there_or_no_graph_is_said(bundle_of: BundleOf, tmp_path: Path) -> None:
    folder = bundle_of("tiny").folder
    graphs = (
        "its graphs are embedding.onnx, layer_00.onnx, layer_01.onnx, head.onnx, head_all.onnx"
    )
    for name in (
        "layer_07.onnx",
        "weights.json",
        "layers.onnx",
        "layer.onnx",
        "embedding_01.onnx",
    ):
        assert graphs in message(folder / name)
    assert "is no file" in message(tmp_path / "layer_00.onnx")
    shutil.copy(folder / "layer_00.onnx", tmp_path)
    assert "lies in no bundle" in message(tmp_path / "layer_00.onnx")


def test_moved_weights_are_found_where_they_are_said_to_be(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("tiny")
    path = bundle.folder / "layer_00.onnx"
    with pytest.raises(BundleError, match="--weights-root"):
        GraphFile.at(path, weights_root=tmp_path)
    found = GraphFile.at(path, weights_root=bundle.weights_root)
    assert found.bundle.weights_root == bundle.weights_root


@pytest.mark.usefixtures("quiet")
def test_errors_become_those_that_polygraphy_says_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(PolygraphyException, match="is no file"), plain_errors():
        GraphFile.at(tmp_path / "layer_00.onnx")
