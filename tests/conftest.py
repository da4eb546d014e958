"""What all tests share: the fixture models with their goldens, each loaded once a run."""

import ctypes
import functools
import gc
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import Dtype, GrokConfig
from export_grok.export.checkpoint import open_weights
from export_grok.weights import WeightIndex

# NOTE: no torch and no onnx at the top; tests that need neither run without them.
if TYPE_CHECKING:
    import onnx_ir as ir

    from export_grok.export.contract import GraphKind
    from export_grok.export.model import Grok1

# Triton decides when it is imported: here kernels run on the CPU, one program after the other.
os.environ["TRITON_INTERPRET"] = "1"

DATA = Path(__file__).resolve().parent / "data"
FIXTURES = ("tiny", "tiny8", "deep13")

ModelOf = Callable[[str, Dtype], "Grok1"]
TemplateOf = Callable[[str, "GraphKind", Dtype], "ir.Model"]


@dataclass(frozen=True, kw_only=True)
class Golden:
    """A fixture model: its checkpoint, and what the original program computed with it.

    Attributes:
        arrays: by name, e.g. `f32/prefill_logits`.
    """

    name: str
    folder: Path
    config: GrokConfig
    index: WeightIndex = field(repr=False)
    arrays: Mapping[str, NDArray[Any]] = field(repr=False)


@functools.cache
def load_golden(name: str) -> Golden:
    """Return the fixture model `name`."""
    folder = DATA / name
    config, index = open_weights(folder)
    with np.load(folder / "goldens.npz") as file:
        arrays = dict(file)
    return Golden(name=name, folder=folder, config=config, index=index, arrays=arrays)


@pytest.fixture(scope="session", params=FIXTURES)
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return one fixture model after the other."""
    return load_golden(request.param)


@pytest.fixture(scope="session")
def golden_of() -> Callable[[str], Golden]:
    """Return the way to a fixture model by name."""
    return load_golden


@pytest.fixture(scope="session")
def tiny_config() -> GrokConfig:
    """Return 2 layers of 6 query and 2 key/value heads of 16."""
    return load_golden("tiny").config


@pytest.fixture(scope="session")
def model_of() -> ModelOf:
    """Return the way to the PyTorch model of a fixture. It is shared: leave it as it is."""
    from export_grok.export.load import model_from_index

    @functools.cache
    def model(name: str, dtype: Dtype) -> "Grok1":
        found = load_golden(name)
        return model_from_index(found.config, found.index, dtype)

    return model


@pytest.fixture(scope="session")
def template_of() -> TemplateOf:
    """Return the way to the template of a fixture's graphs. Clone one to change it."""
    from tests.bundles import traced

    def template(name: str, kind: "GraphKind", dtype: Dtype) -> "ir.Model":
        return traced(kind, load_golden(name).config, dtype)

    return template


@pytest.fixture(scope="session", autouse=True)
def quiet_torch() -> None:
    """Keep autograd out and take one thread: the models are too small to share among more."""
    if "torch" in sys.modules:
        import torch

        torch.set_grad_enabled(False)
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_exporter() -> None:
    """Keep what torch's exporter works out anew for each trace: what its 500 functions take.

    It is half the time of a trace. test_trace.py holds traces to the bytes of another process,
    where nothing is kept.
    """
    if "export_grok.export.trace" not in sys.modules:
        return
    for place, name in (
        ("torch.onnx._internal._lazy_import:onnxscript_apis", "get_torchlib_ops"),
        ("torch.onnx._internal.exporter._schemas", "op_signature_from_function"),
    ):
        module = pkgutil.resolve_name(place)
        setattr(module, name, functools.cache(getattr(module, name)))


@pytest.fixture(scope="session", autouse=True)
def few_collections() -> None:
    """Have the garbage collector run less often, and never look at all that was imported."""
    gc.set_threshold(7000)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Let what was flushed count as on the disk: only a loss of power could tell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@functools.cache
def cuda_devices() -> int:
    """Return how many CUDA devices the driver offers; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    works = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if works else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more CUDA devices than there are."""
    for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
        if item.get_closest_marker(marker) and cuda_devices() < needed:
            pytest.skip(f"needs {needed} CUDA device(s), found {cuda_devices()}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless the marker expression speaks of them; the longest come first.

    A test of a minute that is begun last leaves every other worker idle.
    """
    items.sort(key=lambda item: item.path.name != "test_readme.py")
    if "slow" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    if slow:
        config.hook.pytest_deselected(items=slow)
