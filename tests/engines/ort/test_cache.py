"""Keys and values are written in place: no copy, no allocation, no slot but the new tokens'."""

import gc
import os
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.engines.ort import session as session_module
from export_grok.engines.ort.graphs import bound
from export_grok.engines.ort.session import OrtSession, open_engine
from tests.bundles import BundleOf
from tests.engines.ort.conftest import OpenedOf
from tests.engines.ort.logits import at, filled

pytestmark = pytest.mark.usefixtures("kernels")


def addresses(session: OrtSession) -> list[int]:
    return [array.ctypes.data for array in (*session.keys, *session.values)]


def bits(session: OrtSession) -> list[NDArray[np.uint32]]:
    """Return the caches as they are, NaN included."""
    return [array.view(np.uint32).copy() for array in (*session.keys, *session.values)]


def check_in_place(session: OrtSession) -> None:
    """Write tokens at places of their own in each row; every other bit of the cache must stay."""
    before_addresses = addresses(session)
    for width, start in ((1, np.array([0, 5])), (3, np.array([4, 9])), (1, np.array([20, 1]))):
        filled(session, np.nan)
        for array in (*session.keys, *session.values):
            array[:, :, : start.max()] = 0.5  # what comes before is read, so it is a number
        before = bits(session)
        session.forward(np.full((2, width), 7, np.int64), start, at(2, 0))
        for old, new in zip(before, bits(session), strict=True):
            changed = (old != new).any(axis=(1, 3))  # [B, T]
            slots = np.arange(session.max_length)
            written = (slots >= start[:, None]) & (slots < start[:, None] + width)
            assert (changed == written).all(), "not the written slots changed"
    assert addresses(session) == before_addresses


@pytest.mark.parametrize("name", ["tiny", "tiny8", "deep13"])
def test_only_the_slots_of_new_tokens_change_and_at_the_same_address(
    opened: OpenedOf, name: str
) -> None:
    check_in_place(opened(name, 2, 32))


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


LONG = 1 << 18  # slots: 128 MiB of cache, of which a step may touch a page or two


def check_no_copy(bundle: Bundle) -> None:
    """Decode at the beginning of a long, untouched cache: no memory of its size may be used."""
    session = open_engine(bundle, batch=1, max_length=LONG)
    size = sum(array.nbytes for array in (*session.keys, *session.values))
    token = np.full((1, 1), 7, np.int64)
    gc.collect()
    before = resident()
    session.forward(token, at(1, 0), at(1, 0))  # loads the head, and binds the layers
    tracemalloc.start()
    try:
        for step in range(1, 4):
            session.forward(token, at(1, step), at(1, 0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # By Python and numpy: logits, bindings of the head.
    assert peak < 65536, "arrays were allocated"
    # The built-in attention's scores for T slots are 6 MiB here and all that may grow with them.
    assert resident() - before < size // 4, "memory grew"
    touched = [array.any(axis=(0, 1, 3)) for array in (*session.keys, *session.values)]
    assert all(np.flatnonzero(row).tolist() == [0, 1, 2, 3] for row in touched), "wrong slots"


linux_only = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"
)


@linux_only
def test_a_decode_step_copies_no_cache_and_allocates_none(bundle_of: BundleOf) -> None:
    check_no_copy(bundle_of("tiny"))


def test_a_session_that_is_dropped_gives_its_cache_back_at_once(bundle_of: BundleOf) -> None:
    session = open_engine(bundle_of("tiny"), batch=2, max_length=32)
    session.forward(np.ones((2, 3), np.int64), at(2, 0), at(2, 0))
    cache = weakref.ref(session.keys[0])
    gc.disable()
    try:
        del session
        assert cache() is None
    finally:
        gc.enable()


# The checks go red where the cache is copied.


@pytest.fixture
def separate_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mistake: keys and values come out in memory other than that they go in from."""
    kept: list[NDArray[Any]] = []

    def bound_apart(session: Any, inputs: Any, outputs: dict[str, Any]) -> Any:
        apart = {
            name: np.zeros_like(array) if name in ("k_out", "v_out") else array
            for name, array in outputs.items()
        }
        kept.extend(apart.values())
        return bound(session, inputs, apart)

    monkeypatch.setattr(session_module, "bound", bound_apart)


@linux_only
@pytest.mark.usefixtures("separate_outputs")
def test_the_checks_see_an_engine_with_separate_output_buffers(bundle_of: BundleOf) -> None:
    with pytest.raises(AssertionError, match="not the written slots"):
        check_in_place(open_engine(bundle_of("tiny"), batch=2, max_length=32))
    with pytest.raises(AssertionError, match="memory grew"):
        check_no_copy(bundle_of("tiny"))


@linux_only
def test_the_check_sees_an_engine_that_copies_its_cache(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = OrtSession.forward

    def forward_with_copies(self: OrtSession, *arguments: Any) -> Any:
        copies = [array.copy() for array in self.keys]
        del copies
        return forward(self, *arguments)

    monkeypatch.setattr(OrtSession, "forward", forward_with_copies)
    with pytest.raises(AssertionError, match="arrays were allocated"):
        check_no_copy(bundle_of("tiny"))
