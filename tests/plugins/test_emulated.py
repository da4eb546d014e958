"""Instruction sets of other CPUs, emulated by qemu: all but AVX-512, which it does not know."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.calls import CALLS, FEW
from tests.plugins.driver import Driver, driver_from_sources
from tests.plugins.formulas import assert_right, assert_same_bits

ROOT = Path(__file__).resolve().parent.parent.parent
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-g++")
QEMU_ARM = shutil.which("qemu-aarch64")
QEMU_X86 = shutil.which("qemu-x86_64")
# CPUs of qemu, and what the library has for each.
CPUS = {"Nehalem": ["portable"], "Haswell": ["avx2", "portable"]}

pytestmark = pytest.mark.usefixtures("best_isa")
on_x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="this is no x86-64"
)
with_qemu = pytest.mark.skipif(QEMU_X86 is None, reason="there is no qemu-x86_64")
each_cpu = pytest.mark.parametrize(("cpu", "supported"), CPUS.items(), ids=CPUS)


def assert_all_right(driver: Driver, isa: str) -> None:
    calls = [CALLS[name] for name in FEW]
    one, three = (driver.run(calls, isa, threads) for threads in (1, 3))
    for call, found, other in zip(calls, one, three, strict=True):
        assert_right(call, found, isa)
        assert_same_bits(found, other)


@pytest.mark.skipif(CROSS_COMPILER is None, reason="there is no aarch64-linux-gnu-g++")
@pytest.mark.skipif(QEMU_ARM is None, reason="there is no qemu-aarch64")
def test_neon_is_right(tmp_path: Path) -> None:
    driver = driver_from_sources(
        tmp_path,
        compile_with=str(CROSS_COMPILER),
        processor="aarch64",
        extra=["-static"],
        runner=[str(QEMU_ARM)],
    )
    assert driver.supported() == ["neon"]
    assert_all_right(driver, "neon")


@on_x86
@with_qemu
@each_cpu
def test_a_cpu_without_avx_512_runs_what_it_has(
    cpu: str, supported: list[str], driver: Driver
) -> None:
    words = [str(QEMU_X86), "-cpu", cpu, *driver.program]
    emulated = Driver(program=words, folder=driver.folder)
    assert emulated.supported() == supported
    for isa in supported:
        assert_all_right(emulated, isa)


# Run by an interpreter that is emulated, ONNX Runtime and all.
IN_ONNX_RUNTIME = """
from export_grok.plugins.kernels import native_kernels
from tests.plugins.calls import CALLS, FEW
from tests.plugins.formulas import assert_right
from tests.plugins.ort_calls import run

found = native_kernels()
for call in map(CALLS.get, FEW):
    assert_right(call, run(call, threads=2), found.isa)
print(*found.supported)
"""


@on_x86
@with_qemu
@each_cpu
def test_the_library_itself_runs_there_in_onnx_runtime(
    cpu: str, supported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXPORT_GROK_ISA", raising=False)
    words = [str(QEMU_X86), "-cpu", cpu, sys.executable, "-c", IN_ONNX_RUNTIME]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == supported
