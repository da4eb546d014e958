"""A session of a fixture model on a fake device, and the words that its tests are written in."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.config import Dtype
from export_grok.engines.trt.record import GraphRecord, Sizes
from export_grok.engines.trt.session import TrtSession
from tests.conftest import load_golden
from tests.engines.trt.fake_device import Compute, FakeDevice, FakeRuntime, torch_model
from tests.engines.trt.records import bundle_with, record_for

__all__ = ["TOLERANCE", "Floats", "Ints", "Opened", "at", "ints", "open_fake"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# Of float32 logits, where sums are of another order.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A session, and the fake device that it runs on."""

    session: TrtSession
    device: FakeDevice
    sizes: Sizes


def open_fake(
    folder: Path,
    name: str,
    *,
    batch: int = 2,
    chunk: int = 7,
    max_length: int = 48,
    dtype: Dtype = "float32",
    capture: bool = True,
    int8_head: bool = False,
    compute: Callable[[GraphRecord], Compute] | None = None,
) -> Opened:
    """Open a session on a fake device whose plans are the PyTorch model, or what is given."""
    golden = load_golden(name)
    sizes = Sizes(batch=batch, chunk=chunk, max_length=max_length)
    record = record_for(golden.config, sizes, dtype, head="int8" if int8_head else "float32")
    device = FakeDevice()
    session = TrtSession(
        bundle_with(record, name, folder, dtype, int8_head=int8_head),
        record,
        batch=batch,
        max_length=max_length,
        device=device,
        runtime=FakeRuntime(
            device=device, record=record, compute=compute or torch_model(golden.config, dtype)
        ),
        capture=capture,
    )
    device.runs.clear()
    return Opened(session=session, device=device, sizes=sizes)


def at(rows: int, position: int) -> Ints:
    """Return the same position for so many rows."""
    return np.full(rows, position, np.int64)


def ints(array: Any) -> Ints:
    """Return numbers as a session takes them."""
    return np.asarray(array, np.int64)
