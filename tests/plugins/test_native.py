"""The native kernels without ONNX Runtime: their values, and nothing that a sanitizer reports."""

import functools
import subprocess
from pathlib import Path

import pytest

from tests.plugins.calls import CALLS
from tests.plugins.driver import Driver, compiler, driver_from_sources
from tests.plugins.formulas import Call, assert_right, assert_same_bits

ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
THREAD = ("-fsanitize=thread", "-g1")
# What is not optimised makes each access as it is written, and compiles in seconds.
BUILDS = {
    "address": ("-O0", ADDRESS),
    "thread": ("-O0", THREAD),
    "optimised-address": ("-O3", ADDRESS),
    "optimised-thread": ("-O3", THREAD),
}


pytestmark = pytest.mark.usefixtures("best_isa")


@functools.cache
def built(build: str, folder: Path) -> Driver:
    found = compiler()
    if found is None:
        pytest.skip("there is no C++ compiler")
    optimise, flags = BUILDS[build]
    (folder / "empty.cpp").write_text("int main() {}\n")
    for words in ([found, *flags, "empty.cpp", "-o", "empty"], [folder / "empty"]):
        done = subprocess.run(words, cwd=folder, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no program is compiled and runs with {flags[0]}: {done.stderr}")
    return driver_from_sources(folder, compile_with=found, optimise=optimise, extra=flags)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder for each build."""
    return {build: tmp_path_factory.mktemp(build) for build in BUILDS}


def test_any_number_of_threads_gives_the_same_right_bits(driver: Driver) -> None:
    isas = driver.supported()
    assert isas
    for isa in isas:
        outputs = driver.run(CALLS.values(), isa)
        for call, found in zip(CALLS.values(), outputs, strict=True):
            assert_right(call, found, isa)
        for threads in (2, 3, 7):
            others = driver.run(CALLS.values(), isa, threads)
            for found, other in zip(outputs, others, strict=True):
                assert_same_bits(found, other)


@pytest.mark.parametrize(
    "build",
    [
        "address",
        "thread",
        pytest.param("optimised-address", marks=pytest.mark.slow),
        pytest.param("optimised-thread", marks=pytest.mark.slow),
    ],
)
def test_no_sanitizer_reports_anything(build: str, folders: dict[str, Path]) -> None:
    driver = built(build, folders[build])
    for isa in driver.supported():
        outputs = driver.run(CALLS.values(), isa, threads=3)
        for call, found in zip(CALLS.values(), outputs, strict=True):
            assert_right(call, found, isa)


LINEAR = CALLS["linear-three-tokens"]
EXPERTS = CALLS["experts-one-token"]
ATTENTION = CALLS["attention-last-slot"]


@pytest.mark.parametrize(
    "call",
    [
        LINEAR.but(x=LINEAR.inputs["x"][:, :-1]),
        LINEAR.but(scales=LINEAR.inputs["scales"][:, :-1]),
        EXPERTS.but(gates=EXPERTS.inputs["gates"][:, :1]),
        ATTENTION.but(v_cache=ATTENTION.inputs["v_cache"][:, :, :-1]),
    ],
    ids=["x", "scales", "gates", "v_cache"],
)
def test_an_array_that_is_too_short_is_reported(call: Call, folders: dict[str, Path]) -> None:
    driver = built("address", folders["address"])
    for isa in driver.supported():
        with pytest.raises(AssertionError, match="heap-buffer-overflow"):
            driver.run([call], isa)


@pytest.mark.parametrize(
    "case",
    [
        "linear-one-token-in-parts",
        "linear-tile-and-one",
        "experts-nine-tokens",
        "attention-splits",
    ],
)
def test_a_race_is_reported(case: str, folders: dict[str, Path]) -> None:
    driver = built("thread", folders["thread"])
    with pytest.raises(AssertionError, match="data race"):
        driver.run([CALLS[case]], driver.supported()[0], threads=0)
