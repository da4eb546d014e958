"""Killed at any moment, or out of room, a command leaves what does not load or is right.

`python -m scripts.kill` goes on where these tests end.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from export_grok.config import HeadDtype
from export_grok.export.contract import GRAPH_KINDS
from export_grok.export.graphs import write_graph
from scripts.killing.works import WORKS, trace_file
from tests.bundles import BundleOf, bundle_of, traced
from tests.conftest import DATA, load_golden

__all__ = ["bundle_of"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and SIGKILL")

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = DATA / "tiny"
BUNDLES = ["build", "ranks", "overwrite"]
STORES = ["import", "import-overwrite", "import-foreign"]
ANSWERS = ["answers", "answers-overwrite"]
NOT_DONE = ("refused", "as before")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the traces that builds take, as other tests have made them."""
    folder = tmp_path_factory.mktemp("traces")
    config = load_golden(CHECKPOINT.name).config
    graphs: list[tuple[HeadDtype, int]] = [("int8", 1), ("float32", 1), ("float32", 2)]
    for head, ranks in graphs:
        for kind in GRAPH_KINDS:
            model = traced(kind, config, "float32", head, ranks)
            write_graph(model, folder / trace_file(kind, "float32", head, ranks))
    return folder


def kill(works: list[str], folder: Path, *options: object) -> dict[str, Any]:
    """Return what came of breaking commands off, each of them as often."""
    words = ["-m", "scripts.kill", CHECKPOINT, "--json", folder / "told.json", *options]
    for work in works:
        words += ["--work", work]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=5000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())["works"]
    assert not any(one["faults"] for one in told.values())
    assert sum(one["outcomes"].get(what, 0) for one in told.values() for what in NOT_DONE) > 0
    return told


def check_killed(told: dict[str, Any], kills: int) -> None:
    for one in told.values():
        # Each time the folder was looked at before the command ran again.
        assert sum(one["outcomes"].values()) >= one["kills"] + one["full"]
    assert sum(one["kills"] for one in told.values()) == kills


def test_a_killed_build_leaves_what_is_refused_or_right_and_the_next_finishes_it(
    traces: Path, tmp_path: Path
) -> None:
    times = ("--kills", 12, "--timed", 2, "--chains", 1, "--full", 4)
    check_killed(kill(BUNDLES, tmp_path, "--traces", traces, *times), 45)


def test_a_killed_import_leaves_what_is_refused_or_right_and_the_next_finishes_it(
    tmp_path: Path,
) -> None:
    times = ("--kills", 20, "--timed", 2, "--chains", 1, "--full", 6)
    check_killed(kill(STORES, tmp_path, *times), 69)


def test_a_killed_file_of_requests_keeps_its_answers_and_the_next_run_makes_the_others(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    times = ("--kills", 5, "--timed", 1, "--chains", 1, "--full", 3)
    check_killed(kill(ANSWERS, tmp_path, "--bundle", bundle_of("demo").folder, *times), 14)


def test_every_command_is_killed() -> None:
    assert sorted([*BUNDLES, *STORES, *ANSWERS]) == sorted(WORKS)


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS)
def test_so_it_is_at_every_moment(
    work: str, traces: Path, bundle_of: BundleOf, tmp_path: Path
) -> None:
    given = ("--traces", traces, "--bundle", bundle_of("demo").folder)
    kill([work], tmp_path, *given, "--every", "--timed", 100, "--chains", 50)
