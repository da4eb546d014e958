"""The kernels are compiled from the files that are there, and are packed without those."""

import inspect
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from export_grok.plugins.kernels import native_kernels

ROOT = Path(__file__).resolve().parent.parent
PACKED = ("export", "plugins", "engines", "runtime", "export_grok")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}


@pytest.fixture
def setup_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Return what setup.py tells setuptools on a processor, and its constants, by name.

    setuptools need not be there.
    """

    def told(processor: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        names = {
            "Extension": lambda name, sources, **rest: SimpleNamespace(
                name=name, sources=sources, **rest
            ),
            "find_packages": lambda include: include[:1],
            "setup": found.update,
            "build_ext": SimpleNamespace,
        }
        for module in ("setuptools", "setuptools.command", "setuptools.command.build_ext"):
            stand_in = ModuleType(module)
            vars(stand_in).update(names)
            monkeypatch.setitem(sys.modules, module, stand_in)
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.chdir(ROOT)
        return runpy.run_path("setup.py") | found

    return told


def files_of(pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}


def test_all_there_is_in_cpp_is_compiled(setup_of: Callable[[str], dict[str, Any]]) -> None:
    (library,) = setup_of("x86_64")["ext_modules"]
    assert sorted(library.sources) == sorted(files_of("plugins/**/*.cpp"))
    assert set(library.depends) == files_of("plugins/**/*.h")
    assert library.optional, "a compiler that fails would fail the installation"


def test_each_op_has_kernels(setup_of: Callable[[str], dict[str, Any]]) -> None:
    (library,) = setup_of("x86_64")["ext_modules"]
    # all_reduce computes nothing: the ranks of an engine on CPUs add up between its graphs.
    ops = {path.parent.name for path in ROOT.glob("plugins/*/spec.py")} - {"all_reduce"}
    assert ops
    assert {f"plugins/{op}/ort_kernel.cpp" for op in ops} <= set(library.sources)


def test_another_processor_compiles_what_is_for_any(
    setup_of: Callable[[str], dict[str, Any]],
) -> None:
    here, there = (set(setup_of(name)["ext_modules"][0].sources) for name in ("x86_64", "aarch64"))
    of_x86 = {f"plugins/native/variant_{name}.cpp" for name in ("avx2", "avx512", "vnni")}
    assert here - there == of_x86
    assert there < here


def test_the_library_is_found_and_is_no_module_for_python(
    setup_of: Callable[[str], dict[str, Any]],
) -> None:
    told = setup_of("x86_64")
    (library,) = told["ext_modules"]
    name = Path(told["cmdclass"]["build_ext"]().get_ext_filename(library.name))
    assert name.parent == Path("export_grok/plugins")
    assert name.match("ort_kernels*.so")
    assert "." in str(inspect.getmodulename(name.name))  # with a dot pkgutil passes over it


def test_whatever_plugins_hold_goes_into_the_source_distribution() -> None:
    (line,) = (
        line.split()
        for line in (ROOT / "MANIFEST.in").read_text().splitlines()
        if line.startswith("recursive-include plugins ")
    )
    packed = {"*.py", *line[2:]}
    made = {".so", ".pyc"}
    for path in (ROOT / "plugins").rglob("*"):
        if path.is_file() and path.suffix not in made:
            assert any(path.match(pattern) for pattern in packed), path


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_where_there_is_a_compiler_the_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EXPORT_GROK_KERNELS", raising=False)
    assert native_kernels().library is not None, native_kernels().reason


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None or shutil.which("nm") is None, reason="no compiler, or no nm")
def test_variants_leave_the_linker_no_function_to_choose(
    setup_of: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    # Of several copies of an inline function it keeps one, which may be for a CPU not here.
    told = setup_of(platform.machine())
    flags = ["-fPIC", *told["FLAGS"]]
    for name, own in told["VARIANTS"].items():
        source, made = f"plugins/native/variant_{name}.cpp", tmp_path / f"{name}.o"
        command([COMPILER, *flags, *own.split(), "-c", source, "-o", made], ROOT)
        symbols = [line.split()[-2:] for line in command(["nm", made], ROOT).splitlines()]
        assert symbols
        assert not [symbol for kind, symbol in symbols if kind in "WVu"]


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one, made of a copy of the tree by the newest setuptools."""
    folder = tmp_path_factory.mktemp("packaging")
    for name in PACKED:
        left_out = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / "tree" / name, symlinks=True, ignore=left_out)
    for name in FILES:
        shutil.copy(ROOT / name, folder / "tree")
    required = json.dumps(["setuptools>=77"])
    assert f"requires = {required}" in (ROOT / "pyproject.toml").read_text()
    command([sys.executable, "-m", "venv", "venv"], folder)
    python = folder / "venv" / "bin" / "python"
    command([python, "-m", "pip", "install", "-q", "setuptools>=77"], folder)
    make = "import setuptools.build_meta as make; make.build_sdist('..')"
    command([python, "-c", make], folder / "tree")
    (made,) = folder.glob("*.tar.gz")
    return made


def command(words: list[Any], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel_of(source_distribution: Path, folder: Path, **environment: str) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", source_distribution]
    command(pip, folder, **environment)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_source_distribution_holds_all_that_is_compiled(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert files_of("plugins/**/*.cpp") | files_of("plugins/**/*.h") <= names
    assert files_of("export/demo_model/**/*") <= names
    assert not any(name.endswith(".so") or name.startswith("tests/t") for name in names)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_a_wheel_holds_the_library_and_none_of_its_sources(
    source_distribution: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel_of(source_distribution, tmp_path)) as file:
        names = file.namelist()
    assert "export_grok/plugins/ort_kernels.native.so" in names
    assert not [name for name in names if name.endswith(".cpp")]
    # Those of the C library are compiled where it is installed.
    headers = {name for name in names if name.endswith(".h")}
    assert headers == {f"export_grok/{path}" for path in files_of("runtime/c_library/*.h")}
    assert {f"export_grok/{path}" for path in files_of("runtime/c_library/*.c")} <= set(names)


@pytest.mark.slow
def test_what_is_installed_without_a_compiler_runs_by_the_built_in_kernels(
    source_distribution: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel_of(source_distribution, tmp_path, **NO_COMPILER)) as file:
        file.extractall(tmp_path / "installed")
    program = [sys.executable, "-m", "export_grok"]
    environment = {"PYTHONPATH": str(tmp_path / "installed"), "EXPORT_GROK_KERNELS": ""}
    told = json.loads(command([*program, "doctor", "--json"], tmp_path, **environment))
    assert told["folder"] == str(tmp_path / "installed" / "export_grok")
    assert told["kernels"]["library"] is None
    assert "not compiled: install a C++ compiler" in told["kernels"]["reason"]
    command([*program, "demo-checkpoint", "demo"], tmp_path, **environment)
    command([*program, "build-engine", "demo", "--out", "engine"], tmp_path, **environment)
    words = ["generate", "engine", "--prompt", "a", "--max-new-tokens", "3", "--json"]
    assert json.loads(command([*program, *words], tmp_path, **environment))
