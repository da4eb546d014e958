"""Compile the native kernels with native_driver.cpp, and run calls without ONNX Runtime."""

import contextlib
import dataclasses
import os
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from tests.plugins.formulas import Array, Call, y_shape

__all__ = ["Driver", "compiler", "driver_from_sources"]

ROOT = Path(__file__).resolve().parent.parent.parent
OPS = ("int8_linear", "moe_experts", "softcap_attention")
SCALE_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def compiler() -> str | None:
    """Return the compiler that setup.py takes, if it is there."""
    return shutil.which(os.environ.get("CXX", "c++"))


def told_by_setup(processor: str) -> dict[str, Any]:
    """Return the constants of setup.py on a processor, by name. setuptools need not be there."""
    stand_in = SimpleNamespace(
        Extension=lambda *_, **__: None,
        find_packages=lambda **_: [],
        setup=lambda **_: None,
        build_ext=object,
    )
    modules = ("setuptools", "setuptools.command", "setuptools.command.build_ext")
    with (
        mock.patch.dict(sys.modules, dict.fromkeys(modules, stand_in)),
        mock.patch("platform.machine", lambda: processor),
        contextlib.chdir(ROOT),
    ):
        return runpy.run_path("setup.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Driver:
    """A compiled driver.

    Attributes:
        program: with the words before it, if another program runs it.
        folder: for its files.
    """

    program: Sequence[str | Path]
    folder: Path

    def supported(self) -> list[str]:
        """Return the variants that the CPU runs."""
        return self._run().stdout.split()

    def run(self, calls: Iterable[Call], isa: str, threads: int = 1) -> list[list[Array]]:
        """Return the outputs of each call.

        Raises:
            AssertionError: the driver did not end well.
        """
        calls = list(calls)
        written, read = self.folder / "calls.bin", self.folder / "results.bin"
        written.write_bytes(b"".join(map(bytes_of, calls)))
        done = self._run(isa, threads, written, read)
        assert done.returncode == 0, f"{done.returncode}: {done.stderr[:5000]}"
        results = read.read_bytes()
        outputs: list[list[Array]] = []
        place = 0
        for call in calls:
            outputs.append([])
            for shape in output_shapes(call):
                array = np.frombuffer(results, np.float32, int(np.prod(shape)), place)
                outputs[-1].append(array.reshape(shape))
                place += array.nbytes
        assert place == len(results)
        return outputs

    def _run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, self.program), *map(str, words)],
            env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )


def output_shapes(call: Call) -> list[tuple[int, ...]]:
    caches = [call.inputs[name].shape for name in ("k_cache", "v_cache") if name in call.inputs]
    return [y_shape(call), *caches]


def bytes_of(call: Call) -> bytes:
    """Return the call as the driver reads it."""
    inputs = call.inputs
    arrays = [array for name, array in inputs.items() if not name.endswith(("weight", "scales"))]
    numbers: list[int] = [OPS.index(call.op)]
    settings: list[Array] = []
    if call.op == "int8_linear":
        numbers += [len(inputs["x"]), *inputs["weight"].shape]
    elif call.op == "moe_experts":
        numbers += [*inputs["experts"].shape, *inputs["gate_weight"].shape]
    else:
        batch, kv_heads, slots, size = inputs["k_cache"].shape
        tokens, heads = inputs["query"].shape[1], call.attributes["num_heads"]
        numbers += [batch, tokens, slots, heads, kv_heads, size]
        settings = [np.array(call.attributes[name], np.float32) for name in ("scale", "cap")]
    content = np.array(numbers, np.int64).tobytes()
    content += b"".join(map(sized, [*arrays, *settings]))
    for name, codes in inputs.items():
        if name.endswith("weight"):
            scales = inputs[name.replace("weight", "scales")]
            kind = SCALE_TYPES.index(scales.dtype)
            content += np.array([scales.shape[-2], kind], np.int64).tobytes()
            content += sized(codes) + sized(scales)
    return content


def sized(array: Array) -> bytes:
    return np.int64(array.nbytes).tobytes() + array.tobytes()


def driver_from_sources(
    folder: Path,
    *,
    compile_with: str,
    processor: str = "",
    optimise: str = "-O3",
    extra: Sequence[str] = (),
    runner: Sequence[str | Path] = (),
) -> Driver:
    """Return the driver, compiled into a folder by the flags of setup.py but for these.

    Raises:
        AssertionError: it does not compile.
    """
    told = told_by_setup(processor or platform.machine())
    flags = [optimise if flag == "-O3" else flag for flag in told["FLAGS"]] + [*extra]

    def compile_one(source: str) -> Path:
        made = folder / f"{source.replace('/', '_')}.o"
        own = told["VARIANTS"].get(Path(source).stem.removeprefix("variant_"), "").split()
        command([compile_with, *flags, *own, "-c", source, "-o", made])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(
            pool.map(compile_one, [*told["SOURCES"], "tests/plugins/native_driver.cpp"])
        )
    program = folder / "native_driver"
    command([compile_with, *extra, *objects, "-pthread", "-o", program])
    return Driver(program=[*runner, program], folder=folder)


def command(words: Sequence[str | Path]) -> None:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
