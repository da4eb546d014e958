"""Plans by TensorRT's own calls: to a stub of the package, and to the real one, which refuses."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from export_grok.engines.trt import engine as engine_module
from export_grok.engines.trt.engine import PlanRuntime
from export_grok.engines.trt.module import flavour_of
from export_grok.engines.trt.record import Binding
from export_grok.errors import BundleError, MissingDependencyError


def member(name: str) -> Any:
    return SimpleNamespace(name=name)


class Logger:
    """A stub of `ILogger`."""


class StubTensorRT:
    """A stub of the package: one plan of a cache that is written in place."""

    TENSORS: Final = {
        "x": ("INPUT", "BF16", (2, 3), None),
        "start": ("INPUT", "INT64", (2,), None),
        "k_cache": ("INPUT", "HALF", (2, 4), None),
        "k_out": ("OUTPUT", "HALF", (2, 4), "k_cache"),
        "logits": ("OUTPUT", "FLOAT", (2, 5), ""),
        "mask": ("INPUT", "BOOL", (1,), None),
    }

    def __init__(self, *, loads: bool = True, works: bool = True) -> None:
        self.__version__ = "7.8.9"
        self.ILogger = Logger
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="ours")
        self.calls: list[Any] = []
        self.loads, self.works = loads, works

    def Runtime(self, logger: Any) -> Any:  # noqa: N802 - its name there
        self.logger = logger
        return SimpleNamespace(deserialize_cuda_engine=self.deserialise)

    def deserialise(self, plan: bytes) -> Any:
        self.calls.append(("deserialise", plan))
        if not self.loads:
            self.logger.log(1, "for reasons of its own")
            return None
        rows = self.TENSORS
        return SimpleNamespace(
            num_io_tensors=len(rows),
            device_memory_size_v2=4096,
            get_tensor_name=lambda index: [*rows][index],
            get_tensor_shape=lambda name: rows[name][2],
            get_tensor_dtype=lambda name: member(rows[name][1]),
            get_tensor_mode=lambda name: member(rows[name][0]),
            get_aliased_input_tensor=lambda name: rows[name][3],
            create_execution_context=self.context,
        )

    def context(self, strategy: str) -> Any:
        self.calls.append(("context", strategy))
        return SimpleNamespace(
            set_device_memory=self.call("memory"),
            set_tensor_address=self.call("bind"),
            set_communicator=self.call("communicator"),
            execute_async_v3=self.call("enqueue"),
        )

    def call(self, name: str) -> Callable[..., bool]:
        def called(*arguments: Any) -> bool:
            self.calls.append((name, *arguments))
            return self.works

        return called


def runtime(monkeypatch: pytest.MonkeyPatch, stub: StubTensorRT) -> PlanRuntime:
    monkeypatch.setattr(engine_module, "require", lambda name, extra: stub)
    return PlanRuntime(flavour_of("trt"))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "layer.plan"
    path.write_bytes(b"plan")
    return path


def test_stub_plan_tells_its_inputs_and_outputs_as_records_do(
    monkeypatch: pytest.MonkeyPatch, plan: Path
) -> None:
    found = runtime(monkeypatch, StubTensorRT())
    assert found.version == "7.8.9"
    assert found.engine(plan).tensors == (
        Binding(name="x", direction="in", shape=(2, 3), dtype="bfloat16"),
        Binding(name="start", direction="in", shape=(2,), dtype="int64"),
        Binding(name="k_cache", direction="in", shape=(2, 4), dtype="float16"),
        Binding(name="k_out", direction="out", shape=(2, 4), dtype="float16", aliases="k_cache"),
        Binding(name="logits", direction="out", shape=(2, 5), dtype="float32"),
        Binding(name="mask", direction="in", shape=(1,), dtype="BOOL"),
    )


def test_stub_context_works_in_our_memory_and_is_told_addresses_and_stream(
    monkeypatch: pytest.MonkeyPatch, plan: Path
) -> None:
    stub = StubTensorRT()
    context = runtime(monkeypatch, stub).engine(plan).context(1 << 40)
    context.set_communicator("capsule")
    context.bind("x", 512)
    context.enqueue(77)
    assert stub.calls == [
        ("deserialise", b"plan"),
        ("context", "ours"),
        ("memory", 1 << 40, 4096),
        ("communicator", "capsule"),
        ("bind", "x", 512),
        ("enqueue", 77),
    ]


def test_stub_plan_that_does_not_load_is_named(
    monkeypatch: pytest.MonkeyPatch, plan: Path
) -> None:
    found = runtime(monkeypatch, StubTensorRT(loads=False))
    with pytest.raises(
        BundleError, match=r"layer.plan does not load in tensorrt 7.8.9: for reasons"
    ):
        found.engine(plan)
    with pytest.raises(BundleError, match=r"gone.plan cannot be read: No such file"):
        found.engine(plan.parent / "gone.plan")


def test_stub_context_that_refuses_is_an_error(
    monkeypatch: pytest.MonkeyPatch, plan: Path
) -> None:
    context = runtime(monkeypatch, StubTensorRT(works=False)).engine(plan).context(0)
    with pytest.raises(RuntimeError, match=r"layer.plan refused address 0x200 for x"):
        context.bind("x", 512)
    with pytest.raises(RuntimeError, match="refused the communicator of all ranks"):
        context.set_communicator("capsule")
    with pytest.raises(RuntimeError, match="refused to be enqueued"):
        context.enqueue(7)


def test_everything_that_is_called_is_in_the_package() -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx")
    for owner, names in {
        trt.Runtime: "deserialize_cuda_engine",
        trt.ICudaEngine: "num_io_tensors device_memory_size_v2 get_tensor_name get_tensor_shape "
        "get_tensor_dtype get_tensor_mode get_aliased_input_tensor create_execution_context",
        trt.IExecutionContext: "set_device_memory set_tensor_address set_communicator "
        "execute_async_v3",
        trt.ExecutionContextAllocationStrategy: "USER_MANAGED",
        trt.TensorIOMode: "INPUT OUTPUT",
        trt.DataType: " ".join(engine_module._DTYPES),
    }.items():
        for name in names.split():
            assert hasattr(owner, name), (owner, name)


def test_what_is_no_plan_does_not_load_in_the_real_package(plan: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    found = PlanRuntime(flavour_of("trt-rtx"))
    with pytest.raises(BundleError) as error:
        found.engine(plan)
    assert f"{plan} does not load in tensorrt_rtx {found.version}: " in str(error.value)
    assert "it does not say why" not in str(error.value)


def test_without_its_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: Any = None
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", gone)
    with pytest.raises(MissingDependencyError, match=r"export-grok\[tensorrt-rtx\]"):
        PlanRuntime(flavour_of("trt-rtx"))
