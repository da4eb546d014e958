"""The library, made once a run, and programs in C that are compiled against it."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from export_grok.errors import MissingDependencyError
from export_grok.runtime.c_library.build import build_library
from tests.bundles import BundleOf
from tests.bundles import bundle_of as bundle_of

PROGRAMS = Path(__file__).resolve().parent / "programs"
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1", "-g", "-pthread")

Program = Callable[[str], Path]


@pytest.fixture(scope="session")
def c_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `export-grok c-library` writes."""
    folder = tmp_path_factory.mktemp("c_library") / "made"
    try:
        build_library(folder)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def program(c_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return the way to a program of the folder `programs`, compiled by gcc.

    One whose name ends in .so is a library.
    """
    compiler = shutil.which("gcc")
    folder = tmp_path_factory.mktemp("programs")
    lib = c_library / "lib"

    def compiled(name: str) -> Path:
        if compiler is None:
            pytest.skip("gcc is not installed")
        made = folder / name
        if not made.exists():
            source = (PROGRAMS / name).with_suffix(".c")
            words: list[str | Path] = [compiler, *STRICT, f"-I{c_library / 'include'}", source]
            words += ["-shared", "-fPIC"] if made.suffix == ".so" else []
            words += [f"-L{lib}", "-lexport_grok", f"-Wl,-rpath,{lib}", "-ldl", "-o", made]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        return made

    return compiled


@pytest.fixture(scope="session")
def demo(bundle_of: BundleOf) -> Path:
    """Return the folder of the demo's engine."""
    return bundle_of("demo").folder
