"""The native kernels read and write nothing beyond their operands; see guarded.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.calls import CALLS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and mprotect")
@pytest.mark.parametrize("side", ["begin", "end"])
def test_nothing_beyond_an_operand_is_touched(side: str, isa: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugins.guarded", side, isa],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[: len(CALLS)] == [f"{case} is right" for case in CALLS]
    moved = [line for line in lines[len(CALLS) :] if "noticed" in line.lower()]
    assert len(moved) > 30
    assert all(line.endswith(" was noticed") for line in moved), moved
