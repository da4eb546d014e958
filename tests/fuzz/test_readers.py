"""Whatever is wrong with a file, its reader says so, and does nothing else.

`python -m scripts.fuzz` goes on where these tests end.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from export_grok.config import ExportOptions
from export_grok.engines.pipeline import engine_from_source
from scripts import fuzz
from scripts.fuzzing.targets.all import TARGETS
from tests.bundles import traced_once
from tests.conftest import DATA

__all__ = ["traced_once"]

ROOT = Path(__file__).resolve().parents[2]
GRAPHS = [name for name in TARGETS if "graph" in name]
HEADERS = [name for name in TARGETS if name not in GRAPHS]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, inotify and /proc")


def fuzzed(tmp_path: Path, name: str, *options: object) -> Any:
    words = ["-m", "scripts.fuzz", "--target", name, "--seed", 1, "--keep", tmp_path / "findings"]
    words += ["--json", tmp_path / "told.json", *options]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "told.json").read_text())["targets"][name]
    assert told["findings"] == []
    # Some wrong files are still files, and most are none: both were met.
    assert told["outcomes"].pop("read") > 1
    assert sum(told["outcomes"].values()) > told["inputs"] / 4
    return told


@pytest.mark.parametrize("name", HEADERS)
def test_a_file_that_is_wrong_is_refused_or_holds_what_is_read_from_it(
    name: str, tmp_path: Path
) -> None:
    fuzzed(tmp_path, name)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_that_is_wrong_is_refused_or_runs(
    name: str, tmp_path: Path, traced_once: None
) -> None:
    bundle = tmp_path / "bundle"
    options = ExportOptions(copy_weights=True)
    engine_from_source(DATA / "tiny", bundle, backend="ort", options=options)
    fuzzed(tmp_path, name, "--bundle", bundle)


def test_a_finding_that_was_kept_is_given_again(tmp_path: Path) -> None:
    told = {"target": "index", "removed": [], "odd": {"weights.json": ["pipe", ""]}}
    (tmp_path / "finding.json").write_text(json.dumps(told))
    found = CliRunner().invoke(fuzz.main, ["--replay", str(tmp_path)], catch_exceptions=False)
    assert found.exit_code == 0
    assert found.output.startswith("index: 1 inputs of seed ")
    assert found.output.endswith("; 0 findings (1 BundleError)\n")
