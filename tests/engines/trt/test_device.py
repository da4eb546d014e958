"""The real device, as far as a machine without a GPU goes, and its calls held to the packages."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from export_grok.engines.backend import open_session
from export_grok.engines.trt import device as device_module
from export_grok.engines.trt.device import ALIGNMENT, CudaDevice, Device
from export_grok.engines.trt.host import HostDevice
from export_grok.engines.trt.record import Sizes
from export_grok.engines.trt.session import open_engine
from export_grok.errors import BundleError, ConfigError, MissingDependencyError
from tests.conftest import cuda_devices, load_golden
from tests.engines.trt.fake_device import FakeDevice
from tests.engines.trt.records import bundle_with, record_for

no_gpu = pytest.mark.skipif(cuda_devices() > 0, reason="there is a GPU")


@no_gpu
def test_without_a_driver_one_line_says_what_is_missing_and_what_would_do() -> None:
    pytest.importorskip("cuda.core")
    with pytest.raises(MissingDependencyError) as error:
        CudaDevice()
    said = str(error.value)
    assert "\n" not in said
    for part in ("NVIDIA GPU", "driver", "--backend ort"):
        assert part in said


@pytest.mark.parametrize("missing", ["cuda.core", "cuda.bindings.driver"])
def test_without_its_package_the_extra_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda.core", "cuda.bindings.driver"):
        found: Any = None if name == missing else ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found)
    with pytest.raises(MissingDependencyError, match=rf'{missing} .*"export-grok\[gpu\]"'):
        CudaDevice()


@no_gpu
def test_a_bundle_of_plans_says_at_once_that_there_is_no_gpu(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    record = record_for(load_golden("tiny").config, Sizes(batch=1, chunk=8, max_length=32))
    with pytest.raises(MissingDependencyError, match="NVIDIA GPU"):
        open_session(bundle_with(record, "tiny", tmp_path), batch=1, max_length=32)


def test_a_manifest_that_says_nothing_of_plans_is_refused(tmp_path: Path) -> None:
    record = record_for(load_golden("tiny").config, Sizes(batch=1, chunk=8, max_length=32))
    bundle = bundle_with(record, "tiny", tmp_path)
    bundle.manifest.engine.clear()
    with pytest.raises(BundleError, match="build the engine again"):
        open_engine(bundle, batch=1, max_length=32)


def test_everything_that_is_called_is_in_the_packages() -> None:
    core: Any = pytest.importorskip("cuda.core")
    driver = pytest.importorskip("cuda.bindings.driver")
    graphs = pytest.importorskip("cuda.core.graph")
    for owner, names in {
        core.Device: "set_current name compute_capability create_stream allocate",
        core.Stream: "handle sync create_graph_builder",
        core.Buffer: "handle",
        core.LegacyPinnedMemoryResource: "allocate",
        graphs.GraphBuilder: "begin_building end_building complete",
        graphs.Graph: "launch",
        driver: "cuMemGetInfo cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemsetD8Async "
        "cuMemcpy2DAsync CUDA_MEMCPY2D CUmemorytype cuInit cuDeviceGetCount",
    }.items():
        for name in names.split():
            assert hasattr(owner, name), (owner, name)
    assert "`thread_local`" in graphs.GraphBuilder.begin_building.__doc__
    assert int(driver.CUresult.CUDA_SUCCESS) == 0


class StubCuda:
    """A fake of what `CudaDevice` uses of `cuda.core` and the driver: it writes down the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.code = 0
        self.gpus = 4
        self.address = 4 * ALIGNMENT
        self.memory = np.zeros(64, np.uint8)
        stream = SimpleNamespace(
            handle=77,
            sync=self.call("sync"),
            create_graph_builder=lambda: SimpleNamespace(
                begin_building=self.call("begin"),
                end_building=self.call("end"),
                complete=lambda: SimpleNamespace(launch=self.call("launch")),
            ),
        )
        self.gpu = SimpleNamespace(
            name="Stub",
            compute_capability=(12, 0),
            set_current=self.call("set_current"),
            create_stream=lambda: stream,
            allocate=self.allocate,
        )
        pinned = SimpleNamespace(
            allocate=lambda nbytes: SimpleNamespace(handle=self.memory.ctypes.data, size=nbytes)
        )
        self.modules: dict[str, Any] = {
            "cuda.core": SimpleNamespace(
                Device=self.device, LegacyPinnedMemoryResource=lambda: pinned
            ),
            "cuda.bindings.driver": SimpleNamespace(
                cuInit=self.call("init"),
                cuDeviceGetCount=lambda: (self.code, self.gpus),
                cuMemGetInfo=lambda: (self.code, 5, 9),
                cuMemcpyHtoDAsync=self.call("to device"),
                cuMemcpyDtoHAsync=self.call("to host"),
                cuMemsetD8Async=self.call("set"),
                cuMemcpy2DAsync=self.call("pieces"),
                CUDA_MEMCPY2D=SimpleNamespace,
                CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_DEVICE=2),
            ),
        }

    def call(self, name: str) -> Callable[..., tuple[int]]:
        def called(*arguments: Any) -> tuple[int]:
            self.calls.append((name, *arguments))
            return (self.code,)

        return called

    def device(self, ordinal: int) -> Any:
        if ordinal >= self.gpus:
            raise ValueError("no such device")
        self.calls.append(("device", ordinal))
        return self.gpu

    def allocate(self, nbytes: int, *, stream: Any) -> Any:
        if nbytes > 1000:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        return SimpleNamespace(handle=self.address)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubCuda:
    cuda = StubCuda()
    monkeypatch.setattr(device_module, "require", lambda name, extra: cuda.modules[name])
    return cuda


def test_stub_driver_is_told_address_length_and_stream_and_waited_for(stub: StubCuda) -> None:
    device = CudaDevice()
    assert (device.name, device.sm, device.stream) == ("Stub", 120, 77)
    assert (device.memory().free, device.memory().total) == (5, 9)
    array = np.arange(6, dtype=np.int64)
    stub.calls.clear()
    device.upload(512, array)
    device.download(768, array)
    device.clear(256, 33)
    here = array.ctypes.data
    assert stub.calls == [
        ("to device", 512, here, 48, 77),
        ("sync",),
        ("to host", here, 768, 48, 77),
        ("sync",),
        ("set", 256, 0, 33, 77),
    ]


def test_stub_driver_is_told_of_pieces_on_the_device_and_not_waited_for(stub: StubCuda) -> None:
    device = CudaDevice()
    stub.calls.clear()
    device.copy_pieces(512, 4096, pieces=3, nbytes=80, pitch=256)
    ((name, told, stream),) = stub.calls
    assert (name, stream) == ("pieces", 77)
    source = (told.srcMemoryType, told.srcDevice, told.srcPitch)
    target = (told.dstMemoryType, told.dstDevice, told.dstPitch)
    assert (source, target) == ((2, 4096, 256), (2, 512, 256))
    assert (told.WidthInBytes, told.Height) == (80, 3)


class Memcpy2D(ctypes.Structure):
    """`CUDA_MEMCPY2D` as cuda.h has it."""

    _fields_ = (
        *(("srcX", ctypes.c_size_t), ("srcY", ctypes.c_size_t), ("srcType", ctypes.c_int)),
        *((name, ctypes.c_void_p) for name in ("srcHost", "srcDevice", "srcArray")),
        *(("srcPitch", ctypes.c_size_t), ("dstX", ctypes.c_size_t), ("dstY", ctypes.c_size_t)),
        ("dstType", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("dstHost", "dstDevice", "dstArray")),
        *((name, ctypes.c_size_t) for name in ("dstPitch", "WidthInBytes", "Height")),
    )


def test_what_the_driver_reads_of_pieces_is_what_was_meant(
    stub: StubCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own structure, in memory; the driver is none."""
    driver = pytest.importorskip("cuda.bindings.driver")
    told = stub.modules["cuda.bindings.driver"]
    told.CUDA_MEMCPY2D, told.CUmemorytype = driver.CUDA_MEMCPY2D, driver.CUmemorytype
    device = CudaDevice()
    stub.calls.clear()
    device.copy_pieces(3 << 40, 5 << 40, pieces=8, nbytes=3 << 33, pitch=7 << 33)
    ((_, passed, _),) = stub.calls
    found = Memcpy2D.from_address(passed.getPtr())
    read = {name: getattr(found, name) for name, *_ in Memcpy2D._fields_}
    assert {name: value for name, value in read.items() if value} == {
        "srcType": 2,
        "srcDevice": 5 << 40,
        "srcPitch": 7 << 33,
        "dstType": 2,
        "dstDevice": 3 << 40,
        "dstPitch": 7 << 33,
        "WidthInBytes": 3 << 33,
        "Height": 8,
    }


@pytest.mark.parametrize("kind", [HostDevice, FakeDevice])
def test_pieces_are_copied_and_nothing_between_them(kind: Callable[[], Device]) -> None:
    device = kind()
    source, target = np.random.default_rng(1).integers(256, size=(2, 5, 40)).astype(np.uint8)
    addresses = [device.allocate(200), device.allocate(200)]
    for address, array in zip(addresses, (source, target), strict=True):
        device.upload(address, array)
    device.copy_pieces(addresses[1] + 80, addresses[0] + 40, pieces=3, nbytes=7, pitch=40)
    found = np.empty_like(target)
    device.download(addresses[1], found)
    target[2:5, :7] = source[1:4, :7]
    np.testing.assert_array_equal(found, target)


def test_stub_driver_is_sent_no_array_with_gaps(stub: StubCuda) -> None:
    device = CudaDevice()
    stub.calls.clear()
    for copy in (device.upload, device.download):
        with pytest.raises(AssertionError, match="strides"):
            copy(0, np.arange(6)[::2])
    assert stub.calls == []


def test_stub_driver_that_fails_is_named_with_its_code(stub: StubCuda) -> None:
    device = CudaDevice()
    stub.code = 700
    with pytest.raises(RuntimeError, match="cuMemGetInfo failed on Stub: 700"):
        device.memory()


def test_stub_memory_that_cannot_be_had_is_told_in_bytes(stub: StubCuda) -> None:
    device = CudaDevice()
    assert device.allocate(1000) == stub.address
    with pytest.raises(ConfigError, match=r"1001 bytes .* Stub .*OUT_OF_MEMORY.*--batch"):
        device.allocate(1001)
    stub.address += 1
    with pytest.raises(AssertionError, match="no multiple of 256"):
        device.allocate(8)


def test_stub_host_memory_is_the_page_locked_one(stub: StubCuda) -> None:
    array = CudaDevice().host_memory(64)
    array[:] = 5
    assert (stub.memory == 5).all()


def test_stub_capture_records_work_once_and_a_launch_does_not_call_it(stub: StubCuda) -> None:
    device = CudaDevice()
    stub.calls.clear()

    def work() -> None:
        stub.calls.append(("work",))

    launch = device.captured(work)
    launch()
    launch()
    names = [name for name, *_ in stub.calls]
    assert names == ["begin", "work", "end", "launch", "launch"]
    assert stub.calls[0] == ("begin", "thread_local")


def test_stub_capture_ends_when_the_work_fails(stub: StubCuda) -> None:
    def work() -> None:
        raise ValueError("refused")

    device = CudaDevice()
    with pytest.raises(ValueError, match="refused"):
        device.captured(work)
    assert [name for name, *_ in stub.calls][-1] == "end"


def test_stub_gpu_of_a_rank_is_that_of_its_number(stub: StubCuda) -> None:
    for rank in (0, 3):
        CudaDevice(rank, 4)
        assert stub.calls[-2:] == [("device", rank), ("set_current",)]


@pytest.mark.parametrize("rank", [0, 7])
def test_stub_gpus_that_are_too_few_are_told_on_every_rank_and_none_is_taken(
    stub: StubCuda, rank: int
) -> None:
    with pytest.raises(ConfigError) as error:
        CudaDevice(rank, 8)
    said = str(error.value)
    assert "needs 8 GPUs, sees 4" in said
    assert "CUDA_VISIBLE_DEVICES" in said
    assert "--tp" in said
    assert [name for name, *_ in stub.calls] == ["init"]


def test_stub_driver_without_a_gpu_is_no_matter_of_their_number(stub: StubCuda) -> None:
    stub.gpus = 0
    with pytest.raises(MissingDependencyError, match="NVIDIA GPU"):
        CudaDevice(1, 2)
