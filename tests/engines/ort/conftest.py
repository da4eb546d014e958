"""What the tests of the ONNX Runtime engine share: both kinds of kernels, and loaded sessions."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from export_grok.engines.ort import session as session_module
from export_grok.engines.ort.graphs import load_graph
from export_grok.engines.ort.session import OrtSession, open_engine
from export_grok.plugins import kernels as kernels_module
from export_grok.plugins.kernels import CHOICE, native_kernels
from tests.bundles import BundleOf
from tests.engines.ort.logits import filled
from tests.plugins.conftest import isa as isa

OpenedOf = Callable[..., OrtSession]

# The graphs that each kind of kernels runs, as `graph_file` calls them.
VARIANTS = {"native": "", "builtin": "ort"}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the session use the native kernels; skip where there are none."""
    found = native_kernels()
    if found.library is None:
        pytest.skip(f"there are no native kernels: {found.reason}")
    monkeypatch.setenv(CHOICE, "native")


@pytest.fixture
def builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the session use the kernels built into ONNX Runtime."""
    monkeypatch.setenv(CHOICE, "builtin")


@pytest.fixture(params=list(VARIANTS))
def kernels(request: pytest.FixtureRequest) -> str:
    """Have the session use one kind of kernels after the other, and return which."""
    name: str = request.param
    request.getfixturevalue(name)
    return name


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Have no library where it is looked for, and no variable set."""
    with monkeypatch.context() as patch:
        patch.delenv(CHOICE, raising=False)
        patch.setattr(kernels_module, "__file__", str(tmp_path / "kernels.py"))
        kernels_module._found.cache_clear()
        yield
    kernels_module._found.cache_clear()


@pytest.fixture(scope="session")
def sessions(bundle_of: BundleOf) -> OpenedOf:
    loaded: dict[Path, ort.InferenceSession] = {}  # kernels tell by the name of the file

    def load_once(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
        if path not in loaded:
            loaded[path] = load_graph(path, options)
        return loaded[path]

    @functools.cache
    def session(_kernels: str, name: str, batch: int, max_length: int) -> OrtSession:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session_module, "load_graph", load_once)
            # With more threads than one, most time would go into waking and waiting.
            return open_engine(bundle_of(name), batch=batch, max_length=max_length, threads=1)

    return session


@pytest.fixture(scope="module")
def opened_by(isa: str, bundle_of: BundleOf) -> OpenedOf:
    """Return the way to a session by one instruction set: shared, its caches filled with NaN."""

    @functools.cache
    def session(name: str, batch: int, max_length: int, threads: int | None) -> OrtSession:
        return open_engine(bundle_of(name), batch=batch, max_length=max_length, threads=threads)

    def opened(name: str, batch: int, max_length: int, threads: int | None = None) -> OrtSession:
        found = filled(session(name, batch, max_length, threads), np.nan)
        assert found.kernels.isa == isa
        return found

    return opened


@pytest.fixture
def opened(sessions: OpenedOf, kernels: str) -> OpenedOf:
    """Return the way to a session. It is shared: what its cache holds must not matter."""
    return functools.partial(sessions, kernels)
