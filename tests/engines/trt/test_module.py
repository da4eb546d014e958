"""The choice between the packages: what is missing or cannot be built for is told in one line."""

import ctypes
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from export_grok.engines.trt import module
from export_grok.engines.trt.module import FLAVOURS, Gpu, first_gpu, flavour_of
from export_grok.errors import BuildError, ConfigError, MissingDependencyError

ROOT = Path(__file__).resolve().parents[3]
TRT, RTX = FLAVOURS
H200 = Gpu(name="NVIDIA H200", sm=90)


class FakeDriver:
    """Answers as libcuda does for one H200, or fails in one function."""

    def __init__(self, fails_in: str = "") -> None:
        self._fails_in = fails_in

    def __getattr__(self, function: str) -> Any:
        return lambda *arguments: self._answer(function, *arguments)

    def _answer(self, function: str, *arguments: Any) -> int:
        if function == self._fails_in:
            return 100
        match function:
            case "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_NO_DEVICE"
            case "cuDeviceGetName":
                arguments[0].value = b"NVIDIA H200"
            case "cuDeviceGetAttribute":
                arguments[0]._obj.value = {75: 9, 76: 0}[arguments[1]]
        return 0


def no_library(_name: str) -> None:
    raise OSError("libcuda.so.1: cannot open shared object file")


def gpu_at_hand(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setattr(module, "first_gpu", lambda: gpu)


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_backends_are_found_by_name() -> None:
    assert [flavour_of(flavour.backend) for flavour in FLAVOURS] == list(FLAVOURS)
    with pytest.raises(ConfigError, match="'ort' builds no plans; use --backend trt or trt-rtx"):
        flavour_of("ort")


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {flavour.extra for flavour in FLAVOURS} <= project["optional-dependencies"].keys()


def test_rtx_builds_for_all_it_knows_that_have_bfloat16() -> None:
    pytest.importorskip("tensorrt_rtx", reason="asks tensorrt_rtx")
    assert {80, 89, 120} <= set(RTX.architectures())
    assert 75 not in RTX.architectures()
    assert list(RTX.architectures()) == sorted(RTX.architectures())
    assert RTX.version() == RTX.load().__version__
    RTX.check_architectures(RTX.architectures())


def test_an_architecture_rtx_does_not_build_for_is_refused_with_those_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = dict.fromkeys(["NONE", "CURRENT", "SM75", "SM120", "SM89"])
    fake = SimpleNamespace(ComputeCapability=SimpleNamespace(__members__=members))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake)
    with pytest.raises(ConfigError) as refused:
        RTX.check_architectures([89, 90, 75])
    assert one_line(refused) == ("tensorrt_rtx builds no plans for SM90, SM75; use --sm 89,120")


def test_without_a_package_its_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(MissingDependencyError) as missing:
        RTX.architectures()
    assert 'pip install "export-grok[tensorrt-rtx]"' in one_line(missing)


def test_tensorrt_without_a_driver_points_at_rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    for ask in (TRT.load, TRT.version, TRT.architectures, lambda: TRT.check_architectures([90])):
        with pytest.raises(BuildError) as refused:
            ask()
        text = one_line(refused)
        assert "there is no NVIDIA driver here (libcuda.so.1: cannot open" in text
        assert "--backend trt-rtx builds on a CPU" in text


def test_tensorrt_without_its_package_points_at_its_extra_and_at_rtx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu_at_hand(monkeypatch, H200)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependencyError) as missing:
        TRT.load()
    text = one_line(missing)
    assert 'pip install "export-grok[gpu]"' in text
    assert "--backend trt-rtx builds on a CPU" in text


def test_tensorrt_builds_for_the_gpu_at_hand_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_at_hand(monkeypatch, H200)
    assert TRT.architectures() == (90,)
    TRT.check_architectures([90])
    with pytest.raises(ConfigError) as refused:
        TRT.check_architectures([90, 80])
    text = one_line(refused)
    assert "NVIDIA H200 (SM90)" in text
    assert "SM80" in text


def test_a_gpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_at_hand(monkeypatch, Gpu(name="Tesla T4", sm=75))
    with pytest.raises(ConfigError, match="Tesla T4 is SM75, which has no bfloat16"):
        TRT.architectures()


def test_a_fake_driver_tells_name_and_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    assert first_gpu() == H200


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_what_a_fake_driver_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(fails_in=function))
    with pytest.raises(BuildError, match=rf"{function}: CUDA_ERROR_NO_DEVICE, 100"):
        first_gpu()
