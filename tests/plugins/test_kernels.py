"""Which kernels run is decided by what is here and by two variables, and said in a sentence."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from export_grok.errors import ConfigError
from export_grok.plugins import kernels
from export_grok.plugins.kernels import native_kernels, read_streams

LIBRARIES = sorted(Path(kernels.__file__).parent.glob("ort_kernels*.so"))
with_library = pytest.mark.skipif(not LIBRARIES, reason="the kernels were not compiled")
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-g++")
ANOTHER_MACHINE = b"\xf7\x00"  # Linux BPF: no CPU's


@pytest.fixture(autouse=True)
def looked_for_anew() -> Iterator[None]:
    """Have nothing known and no variable set; afterwards all is as it was."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(kernels.CHOICE, raising=False)
        environment.delenv(kernels.ISA, raising=False)
        kernels._found.cache_clear()
        yield
    kernels._found.cache_clear()
    native_kernels()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty folder in which the library is looked for."""
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    return tmp_path


def assert_none(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none for that reason; who asks for them all the same is told it."""
    found = native_kernels()
    assert (found.library, found.isa, found.supported) == (None, None, ())
    assert reason in found.reason
    with pytest.raises(ConfigError) as error:
        read_streams(np.zeros(9))
    assert str(error.value) == found.reason
    monkeypatch.setenv(kernels.CHOICE, "native")
    with pytest.raises(ConfigError) as error:
        native_kernels()
    assert str(error.value) == f"EXPORT_GROK_KERNELS is native, but {found.reason}"


def test_without_a_library_the_reason_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_none("install a C++ compiler", monkeypatch)


@pytest.mark.parametrize("content", [b"", b"not a library\n", b"no library, " * 1000])
def test_a_file_that_is_no_library_is_named(
    content: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "ort_kernels.native.so"
    path.write_bytes(content)
    assert_none(f"{path} does not load", monkeypatch)


@with_library
@pytest.mark.skipif(sys.platform != "linux", reason="this is no ELF file")
def test_a_library_for_another_machine_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(LIBRARIES[0].read_bytes())
    content[18:20] = ANOTHER_MACHINE  # e_machine
    path = folder / "ort_kernels.native.so"
    path.write_bytes(content)
    assert_none(f"{path} does not load", monkeypatch)


def compiled(folder: Path, compiler: str | None) -> Path:
    """Return a library of one function that nobody asks for, in the place of the kernels."""
    assert compiler is not None
    path = folder / "ort_kernels.native.so"
    (folder / "other.cpp").write_text("int other() { return 0; }\n")
    words: list[str | Path] = [compiler, "-shared", "-fPIC", folder / "other.cpp", "-o", path]
    subprocess.run(words, check=True)
    return path


@pytest.mark.skipif(CROSS_COMPILER is None, reason="there is no aarch64-linux-gnu-g++")
def test_a_library_of_another_compiler_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_none(f"{compiled(folder, CROSS_COMPILER)} does not load", monkeypatch)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_library_without_the_kernels_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_none(str(compiled(folder, shutil.which("c++"))), monkeypatch)


def versions(**installed: str) -> Callable[[str], str]:
    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    return version


@pytest.mark.parametrize("package", ["onnxruntime", "onnxruntime-gpu"])
@pytest.mark.parametrize("old", ["1.23.2", "1.9.0", "0.5"])
def test_an_onnx_runtime_that_is_too_old_is_told_from_which_on(
    package: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "version", versions(**{package: old}))
    short = ".".join(old.split(".")[:2])
    assert_none(f"need ONNX Runtime 1.24 or later, and {short} is installed", monkeypatch)


@with_library
@pytest.mark.parametrize(
    "installed",
    [{"onnxruntime": "1.24.0"}, {"onnxruntime": "1.100.0rc1"}, {"onnxruntime-gpu": "2.0.1"}, {}],
)
def test_later_versions_will_do_and_one_that_is_not_installed(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "version", versions(**installed))
    assert native_kernels().library == LIBRARIES[0]


def test_built_in_kernels_are_taken_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.CHOICE, "builtin")

    def loaded(_path: Path) -> NoReturn:
        raise AssertionError("the library is loaded all the same")

    monkeypatch.setattr(kernels, "_loaded", loaded)
    found = native_kernels()
    assert found.library is None
    assert found.reason == "EXPORT_GROK_KERNELS is builtin"


@pytest.mark.parametrize("choice", ["yes", "Native", " "])
def test_an_unknown_choice_is_told_which_there_are(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.CHOICE, choice)
    with pytest.raises(ConfigError, match=f"is '{choice}'; it must be native, builtin or unset"):
        native_kernels()


@with_library
@pytest.mark.parametrize("isa", ["sse9", "AVX2", "portable avx2", "avx"])
def test_an_unknown_instruction_set_is_told_which_there_are(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    supported = native_kernels().supported
    monkeypatch.setenv(kernels.ISA, isa)
    with pytest.raises(ConfigError) as error:
        native_kernels()
    assert f"is '{isa}'" in str(error.value)
    assert str(error.value).endswith(f"have {', '.join(supported)}")


@with_library
def test_the_best_instruction_set_is_taken_unless_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = native_kernels()
    assert found.isa == found.supported[0]
    assert found.supported[-1] in ("portable", "neon")
    for isa in found.supported:
        monkeypatch.setenv(kernels.ISA, isa)
        assert native_kernels().isa == isa
        assert native_kernels().reason == f"EXPORT_GROK_ISA is {isa}"
        assert native_kernels().supported == found.supported


@with_library
@pytest.mark.parametrize("size", [0, 1, 63, 64, 1027, 4096, 10007])
def test_every_byte_is_read_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A one among zeros is a byte of the sum, wherever it lies."""
    library = kernels._loaded(LIBRARIES[0])
    data = np.zeros(size + 1, np.uint8)[1:]
    for isa in native_kernels().supported:
        monkeypatch.setenv(kernels.ISA, isa)
        read_streams(data)
        assert library.grok1_read_streams(data.ctypes.data, size) == 0
        for place in {*range(0, size, 37), *range(max(0, size - 70), size)}:
            data[place] = 1
            total = library.grok1_read_streams(data.ctypes.data, size)
            assert total in (1, 1 << 8 * (place % 4)), f"{isa}, byte {place}"
            data[place] = 0
