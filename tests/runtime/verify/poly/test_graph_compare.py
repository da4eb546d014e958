"""What two runners give is compared where both give it, and with the right one as reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from polygraphy.comparator import IterationResult, RunResults

from export_grok.config import Dtype, ExportOptions
from export_grok.export.graph_folder import export_graphs
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.poly.data import GivenInputs, GraphInputs
from export_grok.runtime.verify.poly.graph_compare import GraphCompare
from export_grok.runtime.verify.poly.graph_runners import ref_runner
from tests.bundles import BundleOf
from tests.conftest import DATA
from tests.runtime.verify.poly.conftest import passes

Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def inputs(bundle_of: BundleOf) -> GraphInputs:
    """Return inputs of the middle layer of a small model."""
    return GraphInputs(bundle_of("tiny8").folder / "layer_01.onnx")


@pytest.fixture
def right(inputs: GraphInputs) -> list[Arrays]:
    """Return what the reference makes of them."""
    with ref_runner(inputs.file.path) as runner:
        return [runner.infer(feed) for feed in inputs]


def run_of(name: str, outputs: list[Arrays]) -> RunResults:
    """Return outputs as a runner's."""
    results = RunResults()
    results.append((name, [IterationResult(one, runner_name=name) for one in outputs]))
    return results


def changed(outputs: list[Arrays], name: str, factor: float) -> list[Arrays]:
    return [{**one, name: one[name] * np.float32(factor)} for one in outputs]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    return out + err


def test_one_percent_fails_and_is_said_with_its_place(
    inputs: GraphInputs, right: list[Arrays], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = changed(right, "moe", 1.01)
    compare = GraphCompare(inputs)
    assert not passes([run_of("grok-ref", right), run_of("engine", wrong)], compare)
    found = compare.findings["grok-ref", "engine"]
    assert len(found) == len(inputs)
    text = said(capsys)
    for step, findings in zip(inputs.steps, found, strict=True):
        failed = [one for one in findings.deviations if not one.passed]
        assert [one.tensor for one in failed] == ["moe"]
        place = failed[0].place
        assert place is not None
        assert f"FAILED | {step.name:9} | moe       | error 0.0" in text
        assert f"in row {place.row}, position {place.position}, at {list(place.index)}" in text
        assert f"PASSED | {step.name:9} | h_out " in text


@pytest.mark.parametrize("order", [("grok-ref", "other"), ("other", "grok-ref")])
def test_the_pytorch_model_is_the_reference_in_either_place(
    order: tuple[str, str], inputs: GraphInputs, right: list[Arrays]
) -> None:
    outputs = {"grok-ref": right, "other": changed(right, "h_out", 2)}
    compare = GraphCompare(inputs)
    assert not passes([run_of(name, outputs[name]) for name in order], compare)
    (findings, *_), *others = compare.findings.values()
    assert not others
    worst = [one for one in findings.deviations if not one.passed]
    assert [one.tensor for one in worst] == ["h_out"]
    assert worst[0].place is not None
    assert worst[0].place.value == 2 * worst[0].place.wanted


def test_without_it_the_first_is_the_reference(inputs: GraphInputs, right: list[Arrays]) -> None:
    compare = GraphCompare(inputs)
    passes([run_of("one", right), run_of("two", right)], compare)
    assert compare.findings.keys() == {("one", "two")}


def test_of_three_each_is_held_to_its_neighbour(inputs: GraphInputs, right: list[Arrays]) -> None:
    wrong = changed(right, "attention", 1.01)
    runs = [run_of("one", right), run_of("grok-ref", right), run_of("three", wrong)]
    compare = GraphCompare(inputs)
    assert not passes(runs, compare)
    verdicts = {
        pair: all(one.passed for findings in found for one in findings.deviations)
        for pair, found in compare.findings.items()
    }
    assert verdicts == {("grok-ref", "one"): True, ("grok-ref", "three"): False}


def test_what_only_one_gives_is_said_once_and_does_not_fail(
    inputs: GraphInputs, right: list[Arrays], capsys: pytest.CaptureFixture[str]
) -> None:
    stock = [{name: one[name] for name in ("h_out", "k_out", "v_out")} for one in right]
    assert passes([run_of("stock", stock), run_of("grok-ref", right)], GraphCompare(inputs))
    line = "not compared, as only grok-ref gives it: heads, attention,"
    assert said(capsys).count(line) == 1


def test_nothing_in_common_fails(
    inputs: GraphInputs, right: list[Arrays], capsys: pytest.CaptureFixture[str]
) -> None:
    other = [{"logits": one["h_out"]} for one in right]
    assert not passes([run_of("other", other), run_of("grok-ref", right)], GraphCompare(inputs))
    assert "other and grok-ref have no output in common" in said(capsys)


def test_outputs_of_another_shape_fail(
    inputs: GraphInputs, right: list[Arrays], capsys: pytest.CaptureFixture[str]
) -> None:
    wider = [{**one, "h_out": np.repeat(one["h_out"], 2, axis=-1)} for one in right]
    assert not passes([run_of("grok-ref", right), run_of("other", wider)], GraphCompare(inputs))
    assert "h_out has shape (3, 12, 256) of other, and (3, 12, 128) of grok-ref" in said(capsys)


def test_a_slot_that_no_token_writes_is_to_stay_as_it_is(
    inputs: GraphInputs, right: list[Arrays], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [{**one, "v_out": one["v_out"].copy()} for one in right]
    wrong[1]["v_out"][2, 3, -1, 0] += 1
    assert not passes([run_of("grok-ref", right), run_of("other", wrong)], GraphCompare(inputs))
    text = said(capsys)
    assert text.count("written where no token of this step is") == 1
    assert "in row 2, position 28, at [3, 0]" in text


def test_given_inputs_are_compared_whole(inputs: GraphInputs, right: list[Arrays]) -> None:
    given = GivenInputs(inputs.file.path, list(inputs))
    list(given)
    compare = GraphCompare(given)
    assert passes([run_of("grok-ref", right), run_of("other", right)], compare)
    wrong = [{**one, "h_out": one["h_out"].copy()} for one in right]
    wrong[0]["h_out"][2, -1] += 1  # padding of ours
    runs = [run_of("grok-ref", right), run_of("other", wrong)]
    assert passes(runs, GraphCompare(inputs))
    assert not passes(runs, GraphCompare(given))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a layer of graphs in bfloat16."""
    folder = tmp_path_factory.mktemp("half") / "graphs"
    export_graphs(DATA / "tiny", folder, ExportOptions(dtype="bfloat16"))
    return folder / "layer_01.onnx"


@pytest.mark.parametrize(("share", "good"), [(0.0, True), (1.0, True), (3.0, False)])
def test_a_graph_in_bfloat16_may_be_twice_as_far_off_as_roundings_are(
    share: float, good: bool, half: Path
) -> None:
    inputs = GraphInputs(half)
    outputs = {}
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        probe = TorchProbe.of_bundle(inputs.file.bundle, dtype)
        with probe.graph(inputs.file.graph) as run:
            outputs[dtype] = [run(feed) for feed in inputs]
    engine = [
        {**exact, "h_out": exact["h_out"] + share * (rounded["h_out"] - exact["h_out"])}
        for exact, rounded in zip(outputs["float32"], outputs["bfloat16"], strict=True)
    ]
    runs = [run_of("grok-ref", outputs["float32"]), run_of("engine", engine)]
    assert passes(runs, GraphCompare(inputs)) == good
    given = GivenInputs(half, list(inputs))
    list(given)
    assert passes(runs, GraphCompare(given)) == good
