"""Every command of README.md runs as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, Block, blocks, links

README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(block: Block) -> list[str]:
    """Return the lines of a block, less what makes a venv and installs into it."""
    parts = [part for line in block.text.splitlines() for part in line.split(" && ")]
    setup = ("python3 -m venv", ". .venv/bin/activate", "pip install", "pytest")
    return [part for part in parts if not part.startswith(setup)]


def test_the_two_first_commands_install_run_and_test() -> None:
    first, second = blocks(README)[:2]
    assert "pip install -c constraints.txt" in first.text
    assert "export-grok build-engine" in first.text
    assert "export-grok generate" in first.text
    assert second.text.rstrip().endswith("pytest -n 2")


def test_the_extras_that_are_installed_exist() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]", README):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_only_what_needs_the_real_weights_or_a_server_is_left_out() -> None:
    left_out = [block for block in blocks(README) if not block.run]
    assert len(left_out) == 4
    real = [block for block in left_out if "checkpoints" in block.text]
    server = [block for block in left_out if "localhost:8000" in block.text]
    assert (len(real), len(server)) == (2, 2)


def test_commands_run_in_their_order(tmp_path: Path) -> None:
    runnable = [block for block in blocks(README) if block.run]
    assert len(runnable) >= 4
    for block in runnable:
        if block.language == "python":
            lines = [[sys.executable, "-c", block.text]]
        else:
            lines = [shlex.split(command) for command in commands(block)]
        for line in lines:
            environment = dict(os.environ)
            while "=" in line[0]:
                name, _, value = line.pop(0).partition("=")
                environment[name] = value
            fails = line[0] == "!"
            line = line[fails:]
            program = {
                "export-grok": [sys.executable, "-m", "export_grok"],
                "polygraphy": [str(Path(sys.executable).with_name("polygraphy"))],
            }
            line = program.get(line[0], [line[0]]) + line[1:]
            if line[0] == "python":
                line[0] = sys.executable
            done = subprocess.run(
                line,
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,  # the end of what a user types
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert (done.returncode != 0) == fails, f"{line}\n{done.stderr}"


@pytest.mark.parametrize("name", links(README))
def test_links_lead_somewhere(name: str) -> None:
    assert (ROOT / name).exists()
