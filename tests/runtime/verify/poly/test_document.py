"""Every command of docs/polygraphy.md runs as it stands there."""

import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from export_grok.runtime.verify.poly import plugin
from tests.bundles import BundleOf
from tests.documents import ROOT, blocks, links
from tests.runtime.verify.poly.conftest import polygraphy

DOCUMENT = ROOT / "docs" / "polygraphy.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
POLYGRAPHY = Path(sys.executable).with_name("polygraphy")


@pytest.fixture
def in_folder(bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with the demo's checkpoint and engine, as they are called in documents."""
    bundle = bundle_of("demo")
    shutil.copytree(bundle.weights_root, tmp_path / "demo")
    shutil.copytree(bundle.folder, tmp_path / "engine")
    monkeypatch.chdir(tmp_path)


def test_only_what_needs_a_gpu_is_left_out() -> None:
    left_out = [block for block in blocks(TEXT) if not block.run]
    assert len(left_out) == 1
    assert "--grok-trt" in left_out[0].text


def in_process_of_its_own(line: list[str]) -> str:
    """Run polygraphy's command, as a user does, and return what it says."""
    done = subprocess.run(
        [str(POLYGRAPHY), *line[1:]], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("in_folder")
def test_commands_run_in_their_order() -> None:
    first, *others = [block for block in blocks(TEXT) if block.run]
    assert "Passed: 7/7 iterations" in in_process_of_its_own(shlex.split(first.text))
    for block in others:
        if block.language == "python":
            exec(compile(block.text, str(DOCUMENT), "exec"), {})
            continue
        for line in map(shlex.split, block.text.splitlines()):
            if line[0] == "python":
                runpy.run_path(line[1])
            elif "--gen-script" in line:  # it leaves the file open, which is a warning here
                in_process_of_its_own(line)
            else:
                assert line[0] == "polygraphy"
                assert polygraphy(*line[1:]) == 0, line


def test_all_runners_are_told_of() -> None:
    for runner in plugin.argument_groups():
        assert not hasattr(runner, "option") or f"`--{runner.option}`" in TEXT


@pytest.mark.parametrize("name", links(TEXT))
def test_links_lead_somewhere(name: str) -> None:
    assert (DOCUMENT.parent / name).exists()
