"""A process that computes, waits for a disk, or does nothing: told apart by what is counted."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from export_grok.runtime.ranks import watch
from export_grok.runtime.ranks.watch import Patience, Watch, activity
from tests.runtime.ranks.processes import gone, soon

PATIENCE = Patience(stall=8, deadline=100)
PID = 7


@contextmanager
def process(code: str) -> Iterator[int]:
    running = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield running.pid
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what plants the counts of process 7, whose name is a hard one."""
    monkeypatch.setattr(watch, "PROC", tmp_path)
    (tmp_path / str(PID)).mkdir()

    def plant(*, state: str = "S", faults: int = 0, user: int = 0, system: int = 0) -> None:
        fields = [state, *["1"] * 8, faults, "1", user, system, *["1"] * 30]
        text = f"{PID} (a) b (c) {' '.join(map(str, fields))}\n"
        (tmp_path / str(PID) / "stat").write_text(text)

    return plant


def test_one_that_computes_counts_on_and_one_that_is_stopped_says_so() -> None:
    with process("while True: pass") as pid:
        first = activity(pid)
        assert first is not None
        assert soon(lambda: (now := activity(pid)) is not None and now.ticks > first.ticks)
        os.kill(pid, signal.SIGSTOP)
        assert soon(lambda: (now := activity(pid)) is not None and now.stopped)
    assert gone(pid)
    assert activity(pid) is None


@pytest.mark.parametrize("counts", ["faults", "user", "system"])
def test_whatever_grows_is_work(counted: Callable[..., None], counts: str) -> None:
    counted()
    watched = Watch(PID, PATIENCE, 0.0)
    for second in range(0, 90, 5):
        counted(**{counts: second})
        assert watched.complaint(float(second)) is None
    assert watched.complaint(92.9) is None
    assert "stalled: it did nothing for 8 s" in (watched.complaint(93.0) or "")


def test_the_deadline_is_for_those_that_work_too(counted: Callable[..., None]) -> None:
    counted()
    watched = Watch(PID, PATIENCE, 0.0)
    for second in range(0, 100, 5):
        counted(user=second)
        assert watched.complaint(float(second)) is None
    counted(user=100)
    assert "did not come in 100 s" in (watched.complaint(100.0) or "")


def test_one_that_a_signal_stopped_is_told_from_one_that_sleeps(
    counted: Callable[..., None],
) -> None:
    counted(state="T")
    watched = Watch(PID, PATIENCE, 0.0)
    assert "a signal" in (watched.complaint(8.0) or "")
    assert watched.stopped
