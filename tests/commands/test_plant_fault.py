"""A wrong engine is made when asked for by name, and wrong use is told in one message."""

import json
import sys
from pathlib import Path

import pytest

from export_grok.artifacts import open_bundle
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.planting import PLANTED
from tests.commands.conftest import Refused, Run


def test_a_wrong_engine_is_made_and_runs(done: Run, demo: Path, tmp_path: Path) -> None:
    outcome = done("plant-fault", demo, "silu_for_gelu", "--out", tmp_path / "wrong")
    assert outcome.out == (
        f"{tmp_path / 'wrong'}: a wrong engine: the experts' activation is silu instead of gelu "
        "(silu_for_gelu in layer 1, first seen in moe)\n"
    )
    assert open_bundle(tmp_path / "wrong").manifest.engine[PLANTED]["name"] == "silu_for_gelu"
    done("inspect", tmp_path / "wrong")
    answers = [
        done("generate", bundle, "--prompt", "In the beginning", "--max-new-tokens", 8).out
        for bundle in (demo, tmp_path / "wrong")
    ]
    assert answers[0] != answers[1]


def test_json_says_what_was_planted_and_where(done: Run, demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "wrong"
    arguments = ("plant-fault", demo, "cap_of_20", "--out", out, "--layer", 2, "--json")
    assert json.loads(done(*arguments).out) == {
        "out": str(out),
        "name": "cap_of_20",
        "title": "attention logits are capped at 20",
        "graph": "layer",
        "shows": "heads",
        "ranks": False,
        "layer": 2,
    }


def test_all_faults_are_listed(done: Run) -> None:
    shown = done("plant-fault", "--list").out
    assert all(name in shown for name in FAULTS)
    values = json.loads(done("plant-fault", "--list", "--json").out)
    assert [value["name"] for value in values] == list(FAULTS)
    assert {value["name"] for value in values if value["ranks"]} == {"wrong_slice", "sum_left_out"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["BUNDLE", "exact-gelu", "--out", "OUT"], "did you mean 'exact_gelu'? known are "),
        (["BUNDLE", "zzz", "--out", "OUT"], "there is no fault 'zzz'; known are embedding_"),
        (["BUNDLE", "exact_gelu"], "a BUNDLE, the NAME of a fault and --out DIR are needed"),
        (["BUNDLE"], "--list shows the names"),
        ([], "--list shows the names"),
        (["--list", "BUNDLE"], "--list says which faults there are, and makes nothing"),
        (
            ["BUNDLE", "exact_gelu", "--out", "OUT", "--layer", "3"],
            "layer is 3; this model has layers 0 to 2",
        ),
        (
            ["BUNDLE", "layers_in_numeric_order", "--out", "OUT"],
            "it is no mistake for this model: it has 3 layers",
        ),
        (["NONE", "exact_gelu", "--out", "OUT"], "is no folder; give the --out folder of"),
    ],
)
def test_wrong_use_is_told(
    arguments: list[str], said: str, refused: Refused, demo: Path, out: Path, tmp_path: Path
) -> None:
    places = {"BUNDLE": demo, "OUT": out, "NONE": tmp_path / "none"}
    assert said in refused("plant-fault", *(places.get(word, word) for word in arguments))


def test_a_folder_that_holds_something_is_left_alone(
    refused: Refused, demo: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    text = refused("plant-fault", demo, "exact_gelu", "--out", tmp_path, code=1)
    assert text == f"{tmp_path} is not empty; choose a new folder"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_package_is_told_with_its_extra(
    refused: Refused, demo: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    text = refused("plant-fault", demo, "exact_gelu", "--out", out, code=1)
    assert text.startswith("onnx_ir cannot be imported")
    assert text.endswith('Install it with: pip install "export-grok[export]"')
