"""What a library for this Python is made with: a C compiler, Python's headers and its library."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from export_grok.errors import ConfigError, MissingDependencyError

__all__ = ["Toolchain", "toolchain"]


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Where all of it is.

    Attributes:
        compiler: the command that compiles and links C.
        headers: folders of Python's.
        python: its shared library.
        executable: the interpreter, of a virtual environment if it is of one.
        standard_library: folder of Python's own modules.
    """

    compiler: tuple[str, ...]
    headers: tuple[Path, ...]
    python: Path
    executable: Path
    standard_library: Path


def toolchain() -> Toolchain:
    """Return those of the Python that runs this.

    Raises:
        ConfigError: that Python finds export-grok by its environment only.
        MissingDependencyError: something is not there.
    """
    _check_found()
    return Toolchain(
        compiler=_compiler(),
        headers=_headers(),
        python=_python(),
        executable=Path(sys.executable),
        standard_library=Path(sysconfig.get_path("stdlib")),
    )


def _check_found() -> None:
    # As the library starts it: without PYTHONPATH, the user's own packages and this folder.
    command = [sys.executable, "-I", "-c", "import export_grok.runtime.c_library, _cffi_backend"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = (done.stderr.splitlines() or ["no reason was given"])[-1]
        raise ConfigError(
            f"{sys.executable} -I does not load export-grok ({why}), and a program that embeds it "
            "would not either; install export-grok for that Python, best in a virtual environment"
        )


def _compiler() -> tuple[str, ...]:
    named = os.environ.get("CC")
    for command in [named] if named else [sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]:
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return tuple(words)
    what = f"CC names {named}, which is no program here" if named else "there is no C compiler"
    raise MissingDependencyError(
        f"{what}; install one (on Debian: apt install gcc), or name one with CC=..."
    )


def _headers() -> tuple[Path, ...]:
    folders = tuple(dict.fromkeys(Path(sysconfig.get_path(x)) for x in ("include", "platinclude")))
    if not any((folder / "Python.h").is_file() for folder in folders):
        raise MissingDependencyError(
            f"{folders[0]} has no Python.h; install the headers of {sys.executable} (on Debian: "
            f"apt install python{_version()}-dev)"
        )
    return folders


def _python() -> Path:
    """Return the library by the name that programs ask the loader for."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    names = (name, f"libpython{_version()}{sys.abiflags}.so.1.0")
    folders = (sysconfig.get_config_var("LIBDIR") or "", Path(sys.base_prefix, "lib"))
    for folder in folders:
        for each in names:
            if ".so" in each and (path := Path(folder, each)).is_file():
                return path
    raise MissingDependencyError(
        f"{sys.executable} has no shared library ({names[1]}, looked for in "
        f"{' and '.join(map(str, dict.fromkeys(map(str, folders))))}): it is built in one piece, "
        f"which another program cannot load; install that library (on Debian: apt install "
        f"libpython{_version()}), or use a Python built with --enable-shared"
    )


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
