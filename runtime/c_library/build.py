"""Makes the C library for the Python that runs this, with what other builds find it by."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from export_grok import __version__
from export_grok.errors import BuildError, OutputError
from export_grok.files import output_errors
from export_grok.needs import Disk, Needs, OnNeeds
from export_grok.optional import require
from export_grok.runtime.c_library.declarations import HERE, declarations
from export_grok.runtime.c_library.toolchain import Toolchain, toolchain

__all__ = ["build_library"]

SOURCES = ("library.c", "start.c", "end.c", "error.c")
HEADERS = ("export_grok.h", "export_grok.hpp")
PKG_CONFIG = Path("lib/pkgconfig/export_grok.pc")
CMAKE = Path("lib/cmake/export_grok")
TEMPLATES = {
    "export_grok.pc.in": PKG_CONFIG,
    "export_grok-config.cmake.in": CMAKE / "export_grok-config.cmake",
    "export_grok-config-version.cmake.in": CMAKE / "export_grok-config-version.cmake",
}

# -fexceptions: one that a C++ callback throws passes eg_stream, to whoever called that.
FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-fexceptions", "-pthread")
WARNINGS = ("-Wall", "-Wextra")
# nodelete: threads and the end of the program run code of it for as long as the process lives.
LINKED = ("-shared", "-Wl,--no-undefined", "-Wl,-z,nodelete", "-Wl,-z,relro,-z,now")


# Bytes of all files: the library is 0.2 MB, the headers 30 KB.
SIZE = 300_000


def build_library(out: Path, *, on_needs: OnNeeds = lambda needs: None) -> list[Path]:
    """Write library, headers and the files for CMake and pkg-config; return all, below `out`.

    The folder is there whole, or as it was. One that this made before is replaced.

    Args:
        out: folder to write.
        on_needs: gets what that needs, before anything is written.

    Raises:
        BuildError: the compiler fails.
        ConfigError: this Python finds export-grok by its environment only.
        MissingDependencyError: cffi, a compiler, or Python's headers or library are missing.
        OutputError: `out` holds something else, or cannot be written.
    """
    cffi = require("cffi", extra="c-library")
    tools = toolchain()
    _check_ours(out)
    on_needs(Needs(disk=(Disk(folder=out, nbytes=SIZE),), seconds=1.0))
    with _replaced(out) as folder, tempfile.TemporaryDirectory() as scratch:
        generated = Path(scratch, "generated.c")
        ffi = cffi.FFI()
        ffi.cdef(declarations())
        ffi.set_source("_export_grok", '#include "interface.h"', compiler_verbose=0)
        ffi.emit_c_code(str(generated))
        Path(scratch, "made_for.h").write_bytes(_made_for(tools))
        (folder / "lib").mkdir()
        library = folder / "lib" / _soname()
        _compile(tools, Path(scratch), library)
        library.with_suffix("").symlink_to(library.name)
        _write_rest(folder)
    return sorted(path.relative_to(out) for path in out.rglob("*") if not path.is_dir())


def _soname() -> str:
    header = (HERE / "export_grok.h").read_text(encoding="utf-8")
    found = re.search(r"^#define EG_ABI_VERSION (\d+)$", header, re.MULTILINE)
    if found is None:
        raise AssertionError("export_grok.h says which version it is")
    return f"libexport_grok.so.{found[1]}"


def _made_for(tools: Toolchain) -> bytes:
    """Return a header with what the library has to remember."""
    values: dict[str, str | Path] = {
        "VERSION": __version__,
        "EXECUTABLE": tools.executable,
        "STANDARD_LIBRARY": tools.standard_library,
    }
    return b"".join(
        b'#define EG_%s "%s"\n' % (name.encode(), _escaped(os.fsencode(value)))
        for name, value in values.items()
    )


def _escaped(raw: bytes) -> bytes:
    # Octal has three digits at most, so what comes behind cannot be taken for one more.
    return b"".join(b"\\%03o" % byte for byte in raw)


def _compile(tools: Toolchain, scratch: Path, library: Path) -> None:
    command = [
        *(*tools.compiler, *FLAGS),
        *(f"-I{folder}" for folder in (HERE, scratch, *tools.headers)),
    ]
    objects = []
    for source in (scratch / "generated.c", *(HERE / name for name in SOURCES)):
        made = scratch / f"{source.stem}.o"
        own = WARNINGS if source.parent == HERE else ()
        _run([*command, *own, "-c", str(source), "-o", str(made)])
        objects.append(str(made))
    linked = [
        *LINKED,
        f"-Wl,-soname,{library.name}",
        f"-Wl,--version-script={HERE / 'export_grok.map'}",
        f"-Wl,-rpath,{tools.python.parent}",
    ]
    ends = [str(tools.python), "-ldl"]
    _run([*command, *linked, *objects, *ends, "-o", str(library)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise BuildError(
            f"{command[0]} failed ({done.returncode}): {done.stderr.strip()[-2000:]}; it was run "
            f"as: {' '.join(command)}"
        )


def _write_rest(folder: Path) -> None:
    (folder / "include").mkdir()
    for name in HEADERS:
        if (HERE / name).is_file():
            shutil.copyfile(HERE / name, folder / "include" / name)
    for template, place in TEMPLATES.items():
        text = (HERE / template).read_text(encoding="utf-8")
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(
            text.replace("@VERSION@", __version__).replace("@LIBRARY@", _soname()),
            encoding="utf-8",
        )


def _check_ours(out: Path) -> None:
    if out.exists() and any(out.iterdir()) and not (out / PKG_CONFIG).is_file():
        raise OutputError(
            f"{out} is not empty, and no C library of export-grok; choose a new folder"
        )


@contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    """Yield a new folder beside `out` that takes its place if the block ends well."""
    place = out.resolve()
    new, old = (place.parent / f".{place.name}.{name}" for name in ("partial", "old"))
    with output_errors(out):
        # A run that was broken off left these.
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not place.exists():
            old.replace(place)
        shutil.rmtree(old, ignore_errors=True)
        _check_ours(out)
        new.mkdir(parents=True)
        try:
            yield new
            for path in (*new.rglob("*"), new):
                _sync(path)
            if place.exists():
                place.replace(old)
            new.replace(place)
            _sync(place.parent)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
