"""NCCL is asked for what its package has, in an order that never leaves a rank waiting unseen."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from export_grok.engines.trt import communicator as communicator_module
from export_grok.engines.trt.communicator import CAPSULE, Communicator, capsule_of
from export_grok.errors import ConfigError, MissingDependencyError, NumericsError
from tests.engines.trt.fake_ranks import Dtypes, FakeGroup, Hub, address_in, together


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Return where two ranks meet, with a stub of NCCL."""
    found = Hub(2)
    monkeypatch.setattr(communicator_module, "require", lambda name, extra: found.nccl)
    return found


def release(hub: Hub, *numbers: int) -> None:
    library = SimpleNamespace(version=SimpleNamespace(release=numbers))
    hub.nccl.get_version = lambda: SimpleNamespace(libnccl=library)


def test_stub_nccl_connects_all_by_the_id_of_rank_0(hub: Hub) -> None:
    together(hub, lambda rank: Communicator(FakeGroup(hub, rank)))
    assert hub.calls == [["NCCL's unique id", "init"]] * 2


def test_stub_context_gets_the_communicator_once_all_ranks_are_there(hub: Hub) -> None:
    given: dict[int, int] = {}

    def work(rank: int) -> None:
        context: Any = SimpleNamespace(
            set_communicator=lambda capsule: given.update({rank: address_in(capsule)})
        )
        communicator = Communicator(FakeGroup(hub, rank))
        # The group is asked first: it knows of a rank that is gone, TensorRT waits for it.
        communicator.join(context, "layer (decode)")
        assert hub.calls[rank][-1] == "communicator of layer (decode)"

    together(hub, work)
    assert given == {0: 0x1000, 1: 0x1001}


def test_a_capsule_has_the_name_and_the_address_that_tensorrt_looks_for() -> None:
    capsule = capsule_of(0x123456789ABC)
    assert address_in(capsule) == 0x123456789ABC
    assert type(capsule).__name__ == "PyCapsule"
    assert CAPSULE == b"ncclComm_t"
    assert f'"{CAPSULE.decode()}"' in repr(capsule)


def test_stub_nccl_that_fails_is_named_with_the_rank_and_what_has_it_say_more(hub: Hub) -> None:
    def fails(*_arguments: Any) -> Any:
        raise RuntimeError("unhandled\nsystem error")

    hub.nccl.Communicator.init = fails
    group: Any = SimpleNamespace(rank=3, ranks=8, broadcast=lambda data, where: b"")
    with pytest.raises(ConfigError) as error:
        Communicator(group)
    said = str(error.value)
    assert "rank 3 with the other GPUs (unhandled system error)" in said
    assert "NCCL_DEBUG=INFO" in said


def test_an_error_of_the_group_stays_what_it_is(hub: Hub) -> None:
    def broadcast(data: bytes | None, where: str) -> bytes:
        raise NumericsError("of the group")

    group: Any = SimpleNamespace(rank=0, ranks=2, broadcast=broadcast)
    with pytest.raises(NumericsError, match="of the group"):
        Communicator(group)


@pytest.mark.parametrize("numbers", [(2, 18, 9), (3, 0, 0)])
def test_a_version_that_tensorrt_does_not_take_is_told_before_anyone_waits(
    hub: Hub, numbers: tuple[int, ...]
) -> None:
    release(hub, *numbers)
    for rank in range(2):
        with pytest.raises(MissingDependencyError, match=r"2\.19 .*pip install nvidia-nccl-cu13"):
            Communicator(FakeGroup(hub, rank))
    assert hub.calls == [[], []]


def test_the_oldest_version_will_do(hub: Hub) -> None:
    release(hub, 2, 19, 0)
    together(hub, lambda rank: Communicator(FakeGroup(hub, rank)))


def test_without_nccl4py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: Any = None
    monkeypatch.setitem(sys.modules, "nccl.core", gone)
    with pytest.raises(MissingDependencyError, match=r'nccl\.core .*"export-grok\[gpu\]"'):
        Communicator(FakeGroup(Hub(2), 0))


def test_without_nccl_itself_its_package_is_named_on_every_rank() -> None:
    nccl: Any = pytest.importorskip("nccl.core")
    if nccl.get_version().libnccl is not None:
        pytest.skip("NCCL is here")
    for rank in range(2):
        with pytest.raises(MissingDependencyError) as error:
            Communicator(FakeGroup(Hub(2), rank))
        said = str(error.value)
        assert "\n" not in said
        assert "libnccl.so.2" in said
        assert "pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12" in said


def test_everything_that_is_called_is_in_the_package() -> None:
    nccl: Any = pytest.importorskip("nccl.core")
    assert [*inspect.signature(nccl.Communicator.init).parameters][:3] == [
        "nranks",
        "rank",
        "unique_id",
    ]
    assert isinstance(nccl.Communicator.ptr, property)
    assert "libnccl" in inspect.signature(nccl.VersionInfo).parameters
    empty = nccl.get_unique_id(empty=True)
    words = bytes(range(128))
    bindings = importlib.import_module("nccl.bindings.nccl")
    said = " ".join(str(bindings.all_reduce.__doc__).split())
    assert said.startswith("all_reduce(intptr_t sendbuff, intptr_t recvbuff, size_t count,"), said
    for dtype in Dtypes:
        assert nccl.NcclDataType[dtype.name] == dtype
    assert nccl.NcclRedOp.SUM == 0
    assert len(bytes(empty)) == len(words)
    assert bytes(nccl.UniqueId.from_bytes(words)) == words


def test_tensorrt_takes_a_capsule() -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx")
    said = trt.IExecutionContext.set_communicator.__doc__
    assert "CapsuleType) -> bool" in said
    assert "blocks until every rank" in said


def test_the_module_loads_nothing_of_nccl(tmp_path: Path) -> None:
    script = (
        "import sys, export_grok.engines.trt.ranks\n"
        "print([name for name in ('nccl', 'cuda', 'torch') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert run.stdout.strip() == "[]"
