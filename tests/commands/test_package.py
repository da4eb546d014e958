"""`package` from the command line: what it writes, what it says, what it refuses."""

import json
import shutil
from pathlib import Path

import pytest

from export_grok.runtime.triton_server.repository import CONFIG, FILES, MODEL
from tests.bundles import hashes
from tests.commands.conftest import Refused, Run
from tests.runtime.triton_server.pbtxt import read


def parameters(folder: Path) -> dict[str, str]:
    """Return the parameters in a model's configuration."""
    entries = read((folder / CONFIG).read_text())["parameters"]
    return {entry["key"][0]: entry["value"][0]["string_value"][0] for entry in entries}


def test_a_bundle_becomes_a_model_that_points_at_it(done: Run, demo: Path, tmp_path: Path) -> None:
    before = hashes(demo)
    said = done("package", demo, "--triton", tmp_path / "models")
    folder = tmp_path / "models" / "grok"
    assert said.out == f"{folder}: a model of Triton for {demo} (not run under Triton yet)\n"
    assert said.err == ""
    assert hashes(tmp_path / "models").keys() == {f"grok/{file}" for file in FILES}
    assert parameters(folder) == {"bundle": str(demo)}
    assert hashes(demo) == before
    for file in FILES:
        assert "Not run under Triton yet" in (folder / file).read_text()
    compile((folder / MODEL).read_text(), MODEL, "exec")


def test_what_the_server_sees_elsewhere_is_said(
    done: Run, demo: Path, checkpoint: Path, tmp_path: Path
) -> None:
    options = ("--batch", 3, "--max-waiting", 0, "--max-length", 99, "--threads", 2, "--tp", 1)
    places = ("--bundle-path", "/bundles/demo", "--weights-path", "/weights")
    arguments = ("package", demo, "--triton", tmp_path, "--name", "demo", *options, *places)
    said = json.loads(done(*arguments, "--weights-root", checkpoint, "--json").out)
    told = {
        "bundle": "/bundles/demo",
        "weights_root": "/weights",
        "batch": "3",
        "max_waiting": "0",
        "max_length": "99",
        "threads": "2",
        "tensor_parallel": "1",
    }
    assert parameters(tmp_path / "demo") == told
    assert said == {
        "out": str(tmp_path / "demo"),
        "name": "demo",
        "files": list(FILES),
        "run_under_triton": False,
        "parameters": told,
    }


def test_weights_that_were_moved_are_named_where_they_are(
    done: Run, demo: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    done("package", demo, "--triton", tmp_path, "--weights-root", checkpoint.name)
    assert parameters(tmp_path / "grok")["weights_root"] == str(checkpoint)


def test_the_same_again_needs_nothing_and_another_one_has_to_be_wanted(
    done: Run, refused: Refused, demo: Path, tmp_path: Path
) -> None:
    arguments = ("package", demo, "--triton", tmp_path)
    made = done(*arguments)
    before = hashes(tmp_path)
    assert done(*arguments) == made
    assert done(*arguments, "--dry-run").out.startswith("needs nothing\n")
    assert "--overwrite" in refused(*arguments, "--batch", 2, code=1)
    assert hashes(tmp_path) == before
    done(*arguments, "--batch", 2, "--overwrite")
    assert parameters(tmp_path / "grok")["batch"] == "2"


def test_a_configuration_that_was_edited_is_kept(
    done: Run, refused: Refused, demo: Path, tmp_path: Path
) -> None:
    done("package", demo, "--triton", tmp_path)
    with (tmp_path / "grok" / CONFIG).open("a") as file:
        file.write('parameters { key: "EXECUTION_ENV_PATH" value { string_value: "e" } }\n')
    before = hashes(tmp_path)
    assert "was edited" in refused("package", demo, "--triton", tmp_path, code=1)
    assert hashes(tmp_path) == before


def test_a_folder_of_something_else_is_left_alone(
    refused: Refused, demo: Path, tmp_path: Path
) -> None:
    (tmp_path / "grok").mkdir()
    (tmp_path / "grok" / "file").write_bytes(b"precious")
    for more in ((), ("--overwrite",)):
        text = refused("package", demo, "--triton", tmp_path, *more, code=1)
        assert f"{tmp_path / 'grok'} is not empty and no model of this command (file" in text
    assert hashes(tmp_path).keys() == {"grok/file"}


def test_a_bundle_is_no_repository(refused: Refused, demo: Path) -> None:
    before = hashes(demo)
    assert "is a bundle, no repository" in refused("package", demo, "--triton", demo, code=1)
    assert hashes(demo) == before


def test_a_place_that_cannot_be_written_is_told(
    refused: Refused, demo: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for place in (tmp_path / "file", tmp_path / "file" / "models"):
        text = refused("package", demo, "--triton", place, code=1)
        assert text.startswith(f"cannot write {place}")
        assert text.endswith("choose another --triton")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--name", "a/b"), "'a/b' is no name of a model"),
        (("--name", ".hidden"), "'.hidden' is no name"),
        (("--name", ""), "'' is no name"),
        (("--batch", 0), "batch is 0; it must be 1 or more"),
        (("--max-waiting", -1), "max_waiting is -1"),
        (("--max-length", 1), "max_length is 1"),
        (("--max-length", 10**6), "max_length is 1000000"),
        (("--tp", 2), "needs 1 rank"),
        (("--bundle-path", ""), "bundle is empty"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: tuple[object, ...], said: str, refused: Refused, demo: Path, out: Path
) -> None:
    assert said in refused("package", demo, "--triton", out, *options)


def test_a_bundle_that_is_none_or_damaged_is_refused(
    refused: Refused, demo: Path, checkpoint: Path, out: Path, tmp_path: Path
) -> None:
    assert "is no folder" in refused("package", tmp_path / "none", "--triton", out)
    assert "has no manifest.json" in refused("package", checkpoint, "--triton", out)
    bad = shutil.copytree(demo, tmp_path / "bad")
    (bad / "head.onnx").write_bytes(b"x")
    options = ("--triton", out, "--weights-root", checkpoint)
    assert "head.onnx has 1 bytes" in refused("package", bad, *options)
