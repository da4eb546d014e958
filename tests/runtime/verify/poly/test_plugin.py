"""Polygraphy's command with our runners needs no options, obeys all, and is its own without."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from export_grok.artifacts import Bundle, open_bundle, write_manifest
from export_grok.config import ExportOptions
from export_grok.export.graph_folder import export_graphs
from export_grok.runtime.verify.poly import demo_data, plugin
from tests.bundles import BundleOf
from tests.conftest import DATA
from tests.runtime.verify.poly.conftest import Refused, Run, graphs_of

Script = Callable[..., str]

RUNNERS = ("--grok-ref", "--grok-ort", "--grok-functions")


@pytest.fixture
def layer(bundle_of: BundleOf) -> Path:
    """Return a graph of a small model."""
    return bundle_of("tiny").folder / "layer_00.onnx"


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch be missing."""
    demo_data._demo.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", None)
    yield
    demo_data._demo.cache_clear()


@pytest.fixture
def script(run: Run, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return the way to the program that a command generates, less when and by what."""

    def script(*arguments: object) -> str:
        made: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                "polygraphy.tools.script.Script.save", lambda made_of, _: made.append(str(made_of))
            )
            assert run(*arguments, "--gen-script", "-").code == 0
        lines = made[0].splitlines()
        return "\n".join(line for line in lines if not line.startswith(("# Templ", "# Gener")))

    return script


def test_every_graph_passes_by_every_runner(bundle_of: BundleOf, run: Run) -> None:
    for path in graphs_of(bundle_of("tiny")):
        outcome = run(path, *RUNNERS)
        assert outcome.code == 0, outcome.text
        for pair in ("grok-ref vs. grok-ort", "grok-ort vs. grok-functions"):
            assert f"Accuracy Summary | {pair} | Passed: 7/7 iterations" in outcome.text


def test_lowered_graphs_pass_with_built_in_kernels(bundle_of: BundleOf, run: Run) -> None:
    folder = bundle_of("tiny").folder
    for name in ("embedding", "layer_01", "head", "head_all"):
        outcome = run(folder / f"{name}.ort.onnx", "--grok-ref", "--grok-ort")
        assert outcome.code == 0, outcome.text
        assert "ONNX Runtime, built-in kernels" in outcome.text


def test_graphs_of_ranks_pass(of_ranks: Bundle, run: Run) -> None:
    outcome = run(of_ranks.folder / "layer_01.onnx", "--grok-ref", "--grok-ort")
    assert outcome.code == 0, outcome.text
    assert "2 ranks" in outcome.text


def test_the_stock_runner_passes_by_what_it_gives(bundle_of: BundleOf, run: Run) -> None:
    bundle = bundle_of("tiny")
    for path in graphs_of(bundle):
        outcome = run(path, "--onnxrt", "--grok-ref", "--external-data-dir", bundle.weights_root)
        assert outcome.code == 0, outcome.text
        assert "Passed: 7/7 iterations" in outcome.text


def test_an_int8_head_passes(tmp_path: Path, run: Run) -> None:
    export_graphs(DATA / "tiny", tmp_path / "graphs", ExportOptions(head="int8"))
    outcome = run(tmp_path / "graphs" / "head.onnx", "--grok-ref", "--grok-functions")
    assert outcome.code == 0, outcome.text


def test_what_was_saved_is_compared_with_later(layer: Path, run: Run, tmp_path: Path) -> None:
    saved = ["--save-inputs", tmp_path / "inputs", "--save-outputs", tmp_path / "golden"]
    assert run(layer, "--grok-ort", *saved).code == 0
    golden = ["--load-outputs", tmp_path / "golden"]
    inputs = ["--load-inputs", tmp_path / "inputs"]
    assert run(layer, "--grok-ref", *golden).code == 0
    assert run(layer, "--grok-ref", *golden, *inputs).code == 0
    other = layer.with_name("layer_01.onnx")
    assert run(other, "--grok-ref", *golden).code == 1
    assert run(layer, "--grok-ref", *golden, "--seed", 1).code == 1


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--onnxrt",),
        ("--onnxrt", "--iterations", 3, "--seed", 1, "--atol", 1e-3),
        ("--onnxrt", "--load-inputs", "in.json", "--compare", "l2", "--fail-fast"),
        ("--onnxrt", "--data-loader-script", "load.py", "--check-error-stat", "max"),
    ],
)
def test_without_our_runners_nothing_is_changed(
    options: tuple[object, ...], layer: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = script(layer, *options)
    monkeypatch.setattr(plugin, "argument_groups", list)
    assert ours == script(layer, *options)
    assert "grok" not in ours.replace(str(layer), "").replace("export_grok", "")


@pytest.mark.parametrize(
    ("options", "wanted", "unwanted"),
    [
        ((), "compare_func=[GraphCompare(data_loader)]", "SimpleCompareFunc"),
        (("--seed", 3), "seed=3)", "DataLoader("),
        (("--iterations", 2), "iterations=2)", "DataLoader("),
        (("--weights-root", "/moved"), "weights_root='/moved')", "DataLoader("),
        (("--fail-fast",), "[GraphCompare(data_loader)], fail_fast=True", "SimpleCompareFunc"),
        (("--atol", 1e-3), "SimpleCompareFunc(atol={'': 0.001})", "GraphCompare"),
        (("--check-error-stat", "max"), "SimpleCompareFunc(check_error_stat=", "GraphCompare"),
        (("--error-quantile", 0.9), "SimpleCompareFunc(error_quantile=", "GraphCompare"),
        (("--compare", "l2"), "L2CompareFunc()", "GraphCompare"),
        (("--compare-func-script", "c.py"), "InvokeFromScript('c.py'", "GraphCompare"),
        (("--postprocess", "top-5"), "TopKPostprocessFunc", "GraphCompare"),
        (("--load-inputs", "i.json"), "StreamingDataLoader(['i.json']", "GraphInputs"),
        (("--data-loader-script", "d.py"), ", data_loader())", "GraphInputs"),
        (("--val-range", "[0,1]"), "DataLoader(val_range=", "GraphInputs"),
        (("--input-shapes", "h:[1,5,96]"), "DataLoader(input_metadata=", "GraphInputs"),
    ],
)
def test_options_are_obeyed(
    options: tuple[object, ...], wanted: str, unwanted: str, layer: Path, script: Script
) -> None:
    text = script(layer, "--grok-ref", "--grok-ort", *options)
    assert wanted in text
    assert unwanted not in text
    if "GraphInputs" not in text:
        assert f"inputs = GivenInputs('{layer}', data_loader" in text
        assert "data_loader=inputs" in text


def test_a_script_is_the_program_of_its_command(layer: Path, script: Script) -> None:
    text = script(layer, "--grok-ref", "--grok-ort", "--iterations", 2)
    assert f"data_loader = GraphInputs('{layer}', iterations=2)" in text
    assert f"    ref_runner('{layer}'),\n    ort_runner('{layer}')," in text
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["success"] is True


def test_random_inputs_are_refused_for_what_is_wrong_with_them(
    layer: Path, refused: Refused
) -> None:
    text = refused(layer, "--grok-ref", "--val-range", "[0,1]")
    assert "start is 1 to 1; with 1 new tokens and 1 slots in the cache it is 0 to 0" in text
    assert "Leave the options of inputs away" in text
    assert "seed is -1" in refused(layer, "--grok-ref", "--seed", -1)
    assert "iterations 0" in refused(layer, "--grok-ref", "--iterations", 0)


def test_what_is_no_graph_is_refused_in_one_message(
    layer: Path, refused: Refused, tmp_path: Path
) -> None:
    assert "is a template" in refused(layer.with_name("layer.template.onnx"), "--grok-ref")
    assert "its graphs are" in refused(layer.with_name("layer_09.onnx"), "--grok-ref")
    assert "--weights-root" in refused(layer, "--grok-ref", "--weights-root", tmp_path)


def test_runners_that_do_not_go_with_the_bundle_are_refused(
    layer: Path, refused: Refused, tmp_path: Path
) -> None:
    assert "take --grok-ort" in refused(layer, "--grok-trt")
    export_graphs(DATA / "tiny", tmp_path / "graphs", ExportOptions(dtype="bfloat16"))
    graph = tmp_path / "graphs" / "layer_00.onnx"
    assert "holds graphs and no engine" in refused(graph, "--grok-ort")
    assert "are bfloat16" in refused(graph, "--grok-functions")
    assert "--use-subprocess" in refused(
        layer, "--grok-ort", "--use-subprocess", "--sequential-runners"
    )


def test_a_tensorrt_engine_is_refused_where_it_cannot_run(
    bundle_of: BundleOf, refused: Refused, tmp_path: Path
) -> None:
    shutil.copytree(bundle_of("tiny").folder, tmp_path / "engine")
    manifest = open_bundle(tmp_path / "engine").manifest
    write_manifest(tmp_path / "engine", dataclasses.replace(manifest, backend="trt"))
    graph = tmp_path / "engine" / "layer_00.onnx"
    assert refused(graph, "--grok-trt")
    assert "take --grok-trt" in refused(graph, "--grok-ort")


@pytest.mark.usefixtures("without_torch")
def test_without_torch_the_extra_is_named(layer: Path, refused: Refused) -> None:
    text = refused(layer, "--grok-ort")
    assert 'pip install "export-grok[verify]"' in text


def test_nothing_heavy_is_imported_for_those_who_do_not_ask() -> None:
    code = (
        f"import sys, {plugin.__name__} as plugin; plugin.argument_groups(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    heavy = {"torch", "onnx", "onnx_ir", "onnxruntime", "numpy", "export_grok.engines"}
    assert heavy.isdisjoint(done.stdout.split())
