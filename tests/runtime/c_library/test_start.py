"""An interpreter that cannot be started is told by every function, and by nothing else."""

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from export_grok.runtime.c_library import build
from export_grok.runtime.c_library.toolchain import Toolchain, toolchain

CALLS = r"""
#include <stdio.h>
#include <string.h>
#include <export_grok.h>

int main(void)
{
    eg_model model;
    eg_request request;
    eg_piece piece = EG_PIECE_INIT;
    eg_usage_t usage = EG_USAGE_INIT;
    eg_load_t load = EG_LOAD_INIT;
    size_t length;
    const char *text;
    eg_status told[] = {
        eg_open("x", NULL, &model), eg_close(1), eg_submit(1, "a", NULL, &request),
        eg_submit_tokens(1, NULL, 0, NULL, &request), eg_next(1, -1, &piece), eg_cancel(1),
        eg_usage(1, &usage), eg_release(1), eg_load(1, &load), eg_metrics(1, NULL, 0, &length)};
    for (size_t each = 0; each < sizeof told / sizeof *told; each++)
        if (told[each] != EG_PYTHON)
            return 1;
    if (strcmp(eg_version(), "") == 0 || eg_abi_version() != EG_ABI_VERSION)
        return 2;
    if (eg_last_error(&text) != EG_PYTHON)
        return 3;
    puts(text);
    return 0;
}
"""


def told_by(folder: Path) -> str:
    """Return the text that a program gets which calls every function of a library."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    source, made, lib = folder / "calls.c", folder / "calls", folder / "made" / "lib"
    source.write_text(CALLS)
    words: list[str | Path] = [
        "gcc",
        "-std=c11",
        source,
        f"-I{folder / 'made' / 'include'}",
        f"-L{lib}",
    ]
    words += ["-lexport_grok", f"-Wl,-rpath,{lib}", "-o", made]
    subprocess.run(words, check=True, timeout=60)
    done = subprocess.run([made], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def made_for(
    tools: Toolchain, folder: Path, monkeypatch: pytest.MonkeyPatch, version: str | None = None
) -> None:
    pytest.importorskip("cffi")
    monkeypatch.setattr(build, "toolchain", lambda: tools)
    if version is not None:
        monkeypatch.setattr(build, "__version__", version)
    build.build_library(folder / "made")


@pytest.mark.parametrize("field", ["executable", "standard_library"])
def test_a_python_that_is_gone_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    gone = tmp_path / 'a "quoted" place, 道'
    tools = vars(toolchain()) | {field: gone}
    made_for(Toolchain(**tools), tmp_path, monkeypatch)
    text = told_by(tmp_path)
    assert str(gone) in text
    assert re.search("gone.*run export-grok c-library again", text)


def test_a_package_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    executable = tmp_path / "empty" / "bin" / "python"
    tools = vars(toolchain()) | {"executable": executable}
    made_for(Toolchain(**tools), tmp_path, monkeypatch)
    text = told_by(tmp_path)
    assert f"{executable} does not load export-grok: No module named" in text
    assert "again" in text


def test_a_package_of_another_version_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_for(toolchain(), tmp_path, monkeypatch, version="0.0.1")
    text = told_by(tmp_path)
    assert "made with export-grok 0.0.1" in text
    assert sys.executable in text
