"""The instruction sets of the native kernels, one after the other."""

import platform
from collections.abc import Iterator

import pytest

from export_grok.plugins.kernels import native_kernels
from tests.plugins.driver import Driver, compiler, driver_from_sources

# All that the library has on a processor, see plugins/native/library.cpp.
if platform.machine().lower() in ("aarch64", "arm64"):
    INSTRUCTION_SETS: tuple[str, ...] = ("neon",)
else:
    INSTRUCTION_SETS = ("avx512_vnni", "avx512", "avx2", "portable")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have the native kernels use one instruction set after the other, as far as they are here."""
    name: str = request.param
    found = native_kernels()
    if found.library is None:
        pytest.skip(f"there are no native kernels: {found.reason}")
    if name not in found.supported:
        emulated = "AVX-512 is not emulated" if "512" in name else "see test_emulated.py"
        pytest.skip(f"this CPU has no {name}; {emulated}")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("EXPORT_GROK_ISA", name)
        assert native_kernels().isa == name
        yield name
    native_kernels()


@pytest.fixture(scope="session")
def best_isa() -> str:
    """Return the instruction set in use; skip where there are no native kernels."""
    found = native_kernels()
    if found.isa is None:
        pytest.skip(f"there are no native kernels: {found.reason}")
    return found.isa


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Return the native kernels in a program, compiled as in the library."""
    found = compiler()
    if found is None:
        pytest.skip("there is no C++ compiler")
    return driver_from_sources(tmp_path_factory.mktemp("driver"), compile_with=found)
