"""What memcheck sees of a program that submits, pulls and cancels."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from export_grok.runtime.c_library.build import SOURCES
from tests.runtime.c_library.conftest import Program

# A block that Python, numpy or ONNX Runtime keep to the end is still reachable, or possibly lost
# where they point into its middle: that is no leak. One that nothing points at is.
VALGRIND = (
    "valgrind",
    "--leak-check=full",
    "--show-leak-kinds=definite",
    "--num-callers=100",
)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.parametrize("name", ["cancel", "misuse"])
def test_memcheck_finds_no_leak_and_no_wrong_access_of_ours(
    program: Program, demo: Path, tmp_path: Path, name: str
) -> None:
    damaged, log = tmp_path / "damaged", tmp_path / "log"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    word = {"cancel": "20", "misuse": str(damaged)}[name]
    subprocess.run(
        [*VALGRIND, f"--log-file={log}", program(name), demo, word],
        check=True,
        capture_output=True,
        timeout=600,
    )
    records = re.split(r"^==\d+== *$", log.read_text(), flags=re.MULTILINE)
    assert any("LEAK SUMMARY" in record for record in records)
    ours = re.compile("|".join([*map(re.escape, SOURCES), "generated", f"{name}\\.c"]))
    for record in records:
        frames = re.findall(r"(?:at|by) 0x\w+: (.*)", record)
        if "definitely lost in" in record:
            assert not any(ours.search(frame) for frame in frames), record
        elif frames:  # a wrong access: in the loader, or in packages, it is not ours
            assert not ours.search(frames[0]), record
