"""What others reported of building TensorRT plans does not happen here.

docs/reliability.md says which report each test is of, and which tests elsewhere are of others.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from export_grok.artifacts import open_bundle
from export_grok.engines.trt.plan import plan_from_graph
from export_grok.errors import BundleError
from tests.bundles import traced_once
from tests.commands.conftest import Run, run, tiny

__all__ = ["run", "tiny", "traced_once"]

NEEDS_RTX = "TensorRT-RTX is not installed"
OPTIONS = ("--backend", "trt-rtx", "--sm", "89", "--batch", "2", "--max-length", "32")


@pytest.mark.usefixtures("traced_once")
def test_a_build_without_workspace_ends_with_the_error_and_leaves_no_engine(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason=NEEDS_RTX)
    short = functools.partial(plan_from_graph, workspace_bytes=1)
    monkeypatch.setattr("export_grok.engines.trt.build.plan_from_graph", short)
    out = tmp_path / "engine"
    outcome = run("build-engine", tiny, "--out", out, *OPTIONS)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("Error: tensorrt_rtx ")
    assert f"cannot build {out}/trt/layer.decode.onnx for SM89:" in outcome.err
    assert "workspace" in outcome.err.splitlines()[-1]
    with pytest.raises(BundleError, match="holds graphs and no engine"):
        open_bundle(out, kind="engine")
    # What was built before it is whole, and is there for the next try.
    assert not list((out / "trt").glob("layer.*.plan*"))


def test_a_build_that_memory_does_not_suffice_for_says_so_with_both_figures_and_begins_nothing(
    tiny: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason=NEEDS_RTX)
    command = [sys.executable, "-m", "export_grok", "build-engine", str(tiny), "--out", "engine"]
    limit = 1_200_000_000  # the package alone takes most of it
    ended = subprocess.run(
        ["sh", "-c", f'ulimit -v {limit // 1024} && exec "$@"', "sh", *command, *OPTIONS],
        cwd=tmp_path,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # else each core takes some of it
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    last = ended.stderr.splitlines()[-1]
    assert re.search(r"[\d.]+ .B of address space are allowed; [\d.]+ .B are needed", last)
    assert not (tmp_path / "engine").exists()
