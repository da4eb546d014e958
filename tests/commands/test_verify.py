"""`export-grok verify`: exit code, what is printed where, the page, and wrong use."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from export_grok.artifacts import open_bundle
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.planting import plant_fault
from tests.bundles import BundleOf
from tests.commands.conftest import Refused, Run
from tests.documents import ROOT, blocks, links

DOCUMENT = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")

QUICK = ("--prompt", 12, "--tokens", 2, "--threads", 1)


@pytest.fixture
def wrong(demo: Path, tmp_path: Path) -> Path:
    """Return a bundle whose layer 1 has gates that are renormalised."""
    return plant_fault(open_bundle(demo), FAULTS["gates_renormalised"], tmp_path / "wrong").folder


def test_a_right_engine_passes_with_code_0_and_is_quiet(done: Run, demo: Path) -> None:
    outcome = done("verify", demo, *QUICK)
    assert outcome.err == ""
    assert "PASSED" in outcome.out
    for name in ("embedding", "layer 0", "layer 1", "layer 2", "head", "head_all"):
        assert name in outcome.out


def test_a_wrong_engine_fails_with_code_1_and_one_line(run: Run, wrong: Path) -> None:
    outcome = run("verify", wrong, *QUICK)
    assert outcome.code == 1
    said = f"Error: {wrong} does not compute what it must: layer 1 is wrong, its gates in "
    assert outcome.err.startswith(said)
    assert outcome.err.count("\n") == 1
    for word in ("FAILED", "layer 1", "gates", "row ", "position ", "likely cause"):
        assert word in outcome.out
    assert FAULTS["gates_renormalised"].title in " ".join(outcome.out.split())


def test_json_is_all_of_stdout_and_the_code_says_the_same(
    run: Run, demo: Path, wrong: Path
) -> None:
    for folder, code in ((demo, 0), (wrong, 1)):
        outcome = run("verify", folder, *QUICK, "--json")
        found = json.loads(outcome.out)
        assert (outcome.code, found["passed"]) == (code, code == 0)
    assert found["cause"]["fault"] == "gates_renormalised"


def test_the_report_is_written_of_a_wrong_engine_too(
    run: Run, wrong: Path, tmp_path: Path
) -> None:
    outcome = run("verify", wrong, *QUICK, "--report", tmp_path / "report")
    assert outcome.code == 1
    assert f"report: {tmp_path / 'report' / 'index.html'}\n" in outcome.err
    page = (tmp_path / "report" / "index.html").read_text()
    assert "FAILED" in page
    found = json.loads((tmp_path / "report" / "verification.json").read_text())
    assert len(found["graphs"]) == 6, "a report is of all graphs"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tolerance", "h_ot=1e-4"), "there is no tensor 'h_ot'; did you mean 'h_out'?"),
        (("--tolerance", "h_out=much"), "'much' is no number; write TENSOR=NUMBER"),
        (("--tolerance", "1e-4"), "it has no =; write TENSOR=NUMBER"),
        (("--tolerance", "h_out=-1"), "the tolerance of h_out is -1.0"),
        (("--layers", "0,five"), "'0,five' is no list of layers; write e.g. 0,5,63"),
        (("--layers", "9"), "there is no layer 9"),
        (("--layers", "1", "--no-graphs"), "layers are chosen, and no graphs are compared"),
        (("--against", "nowhere"), "there is no such reference"),
        (("--against", "goldens"), "there are no results of the original program"),
        (("--tokens", "-1"), "tokens is -1"),
        (("--prompt", "1"), "prompt is 1"),
        (("--prompt", "999"), "rows of 1007 tokens do not fit this engine"),
        (("--text", "nowhere.txt"), "nowhere.txt cannot be read"),
    ],
)
def test_wrong_use_is_told_in_one_message(
    arguments: tuple[str, ...], said: str, refused: Refused, demo: Path
) -> None:
    assert said in refused("verify", demo, *arguments)


def test_a_bundle_of_another_model_is_no_reference(
    refused: Refused, demo: Path, bundle_of: BundleOf
) -> None:
    text = refused("verify", demo, "--against", bundle_of("tiny").folder)
    assert "is of another model" in text
    assert "emb_size is 96, of the bundle 192" in text


def test_the_commands_of_the_document_run(
    done: Run, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(demo, tmp_path / "engine")
    monkeypatch.chdir(tmp_path)
    for block in blocks(DOCUMENT):
        for command in block.text.splitlines():
            program, *arguments = shlex.split(command)
            assert program == "export-grok"
            done(*arguments)
    assert (tmp_path / "verified" / "index.html").exists()


@pytest.mark.parametrize("name", links(DOCUMENT))
def test_the_links_of_the_document_lead_somewhere(name: str) -> None:
    assert (ROOT / "docs" / name).exists()
