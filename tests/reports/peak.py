"""How much memory a piece of work holds at its peak, beyond what the process had before it."""

import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["peak_memory"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(work: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory grew while `work` ran."""
    gc.collect()
    try:
        CLEAR.write_text("5")  # the peak so far is forgotten
    except OSError as error:
        pytest.skip(f"this system does not tell the peak of a part of a process: {error}")
    before = _kilobytes("VmRSS")
    work()
    return 1024 * (_kilobytes("VmHWM") - before)


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1])
