"""What `export-grok c-library` writes, is found by other builds, and says of what is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from export_grok import __version__
from export_grok.cli import cli
from export_grok.errors import BuildError, ConfigError, MissingDependencyError, OutputError
from export_grok.runtime.c_library import build, toolchain
from export_grok.runtime.c_library.declarations import HERE, declarations
from export_grok.runtime.c_library.status import FINISHES, Status
from tests.runtime.c_library.conftest import PROGRAMS

HEADER = (HERE / "export_grok.h").read_text(encoding="utf-8")
FUNCTIONS = set(
    re.findall(r"^(?:eg_status|int|const char \*) ?\*?(eg_\w+)\(", HEADER, re.MULTILINE)
)
WRITTEN = {
    "include/export_grok.h",
    "include/export_grok.hpp",
    "lib/libexport_grok.so",
    "lib/libexport_grok.so.1",
    "lib/pkgconfig/export_grok.pc",
    "lib/cmake/export_grok/export_grok-config.cmake",
    "lib/cmake/export_grok/export_grok-config-version.cmake",
}

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def output_of(*words: object, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, words)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


# One copy of each fact.


def test_the_codes_are_those_of_the_header() -> None:
    codes = dict(re.findall(r"^    EG_(\w+) = (-?\d+)", HEADER, re.MULTILINE))
    finishes = [codes.pop(name) for name in ("GOES_ON", "STOP", "LENGTH", "CANCELLED", "FAILED")]
    assert {name: int(value) for name, value in codes.items()} == {
        status.name: status.value for status in Status
    }
    assert [int(value) for value in finishes] == list(FINISHES.values())


def test_cffi_is_told_of_every_type_and_of_every_function_that_is_pythons() -> None:
    told = declarations()
    for name in re.findall(r"^} (\w+);", HEADER, re.MULTILINE):
        assert f"}} {name};" in told
    called = set(re.findall(r"eg_py_(\w+)\(", told))
    in_c = {"eg_version", "eg_abi_version", "eg_stream", "eg_last_error"}
    assert {f"eg_{name}" for name in called - {"close_all"}} == FUNCTIONS - in_c


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_the_library_shows_the_functions_of_the_header_and_nothing_else(c_library: Path) -> None:
    library = c_library / "lib" / "libexport_grok.so"
    told = output_of("nm", "-D", "--defined-only", library)
    shown = {line.split()[-1].partition("@")[0] for line in told.splitlines()}
    assert shown - {"EXPORT_GROK_1"} == FUNCTIONS
    assert len(FUNCTIONS) == 14


# How other builds find it.


def test_it_has_a_name_with_the_version_of_its_interface(c_library: Path) -> None:
    lib = c_library / "lib"
    assert (lib / "libexport_grok.so").readlink() == Path("libexport_grok.so.1")
    if shutil.which("readelf"):
        told = output_of("readelf", "-d", lib / "libexport_grok.so")
        assert "soname: [libexport_grok.so.1]" in told
        assert str(toolchain.toolchain().python.parent) in told


@needs_gcc
@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed")
def test_pkg_config_finds_it_where_it_was_moved_to(c_library: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(c_library, moved, symlinks=True)
    where = {"PKG_CONFIG_PATH": str(moved / "lib" / "pkgconfig")}
    flags = output_of("pkg-config", "--cflags", "--libs", "export_grok", **where).split()
    assert output_of("pkg-config", "--modversion", "export_grok", **where).strip() == __version__
    made = tmp_path / "answer"
    output_of("gcc", PROGRAMS / "answer.c", *flags, "-o", made)
    told = output_of("ldd", made, LD_LIBRARY_PATH=str(moved / "lib"))
    assert "not found" not in told


@needs_gcc
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_cmake_finds_it_where_it_was_moved_to(c_library: Path, tmp_path: Path) -> None:
    moved, project = tmp_path / "moved", tmp_path / "project"
    shutil.copytree(c_library, moved, symlinks=True)
    project.mkdir()
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        "project(try C)\n"
        f"find_package(export_grok {__version__} CONFIG REQUIRED)\n"
        f"add_executable(answer {PROGRAMS / 'answer.c'})\n"
        "target_link_libraries(answer PRIVATE export_grok::export_grok)\n"
    )
    output_of("cmake", "-S", project, "-B", project / "made", f"-DCMAKE_PREFIX_PATH={moved}")
    output_of("cmake", "--build", project / "made")
    assert str(moved / "lib") in output_of("ldd", project / "made" / "answer")


# The command.


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("cffi")
    out = tmp_path / "made"
    for _ in range(2):  # the second time it replaces its own
        done = CliRunner().invoke(cli, ["c-library", "--out", str(out), "--json"])
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        assert told["folder"] == str(out)
        assert set(told["files"]) == files_in(out) == WRITTEN
        assert [path.name for path in tmp_path.iterdir()] == ["made"]
        (out / "of an older version").touch()
    assert (out / "include" / "export_grok.h").read_text(encoding="utf-8") == HEADER


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("cffi")
    out = tmp_path / "made"
    done = CliRunner().invoke(cli, ["c-library", "--out", str(out), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("needs 1 MB of disk")
    assert str(out) in done.stdout
    assert not out.exists()


def test_a_folder_of_others_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    with pytest.raises(OutputError, match="choose a new folder"):
        build.build_library(tmp_path)
    assert files_in(tmp_path) == {"theirs"}


def test_what_a_run_left_that_was_killed_is_taken_up(
    c_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".made.partial").mkdir()
    (tmp_path / ".made.partial" / "half").touch()
    shutil.copytree(c_library, tmp_path / ".made.old", symlinks=True)  # between the two renames
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(MissingDependencyError):
        build.build_library(tmp_path / "made")
    monkeypatch.delenv("CC")
    with monkeypatch.context() as patch, pytest.raises(BuildError):
        patch.setenv("CC", "false")
        build.build_library(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert files_in(tmp_path / "made") == WRITTEN


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return the way to take something away from this machine."""

    def take(what: str) -> None:
        if what == "cffi":
            monkeypatch.setitem(sys.modules, "cffi", None)
        elif what == "compiler":
            monkeypatch.delenv("CC", raising=False)
            monkeypatch.setenv("PATH", str(tmp_path))
        elif what == "CC":
            monkeypatch.setenv("CC", "no-such-compiler -O2")
        elif what == "package":
            venv.create(tmp_path / "empty", with_pip=False)
            monkeypatch.setattr(sys, "executable", str(tmp_path / "empty" / "bin" / "python"))
        elif what == "headers":
            monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
        else:
            static = {"INSTSONAME": "libpython3.a", "LIBDIR": str(tmp_path)}
            original = sysconfig.get_config_var
            monkeypatch.setattr(
                sysconfig, "get_config_var", lambda name: static.get(name, original(name))
            )
            monkeypatch.setattr(sys, "base_prefix", str(tmp_path))

    return take


@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("cffi", r"export-grok\[c-library\]"),
        ("compiler", "there is no C compiler; install one"),
        ("CC", "CC names no-such-compiler -O2, which is no program"),
        ("package", r"-I does not load export-grok \(ModuleNotFound.* virtual environment"),
        ("headers", r"has no Python.h; install .* apt install python3\.\d+-dev"),
        ("library", "has no shared library .* --enable-shared"),
    ],
)
def test_what_is_missing_is_told_with_the_remedy(
    without: Callable[[str], None], tmp_path: Path, what: str, remedy: str
) -> None:
    if what != "cffi":
        pytest.importorskip("cffi")
    without(what)
    with pytest.raises((ConfigError, MissingDependencyError), match=remedy):
        build.build_library(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_gcc
def test_a_compiler_that_fails_leaves_what_there_was(
    c_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "made"
    shutil.copytree(c_library, out, symlinks=True)
    monkeypatch.setenv("CC", "gcc -Dint=nonsense")
    with pytest.raises(BuildError, match=r"gcc failed \(1\)"):
        build.build_library(out)
    assert files_in(out) == WRITTEN
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
