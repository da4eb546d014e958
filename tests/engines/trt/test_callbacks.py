"""Progress of a build runs from 0 to 1 and never back; errors of TensorRT are kept."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_grok.engines.trt.callbacks import Messages, Progress, messages_of


class Interface:
    """Stands for one of the classes of TensorRT that it calls."""


FAKE: Any = SimpleNamespace(ILogger=Interface, IProgressMonitor=Interface)


def severity(number: int) -> Any:
    return type("Severity", (int,), {"name": "?"})(number)


def test_a_phase_within_a_step_moves_within_that_step() -> None:
    progress = Progress()
    progress.phase_start("build", None, 4)
    progress.step_complete("build", 0)
    assert progress.fraction == 1 / 4
    progress.phase_start("tactics", "build", 2)
    progress.step_complete("tactics", 0)
    assert progress.fraction == 3 / 8
    progress.phase_finish("tactics")
    assert progress.fraction == 1 / 2
    progress.step_complete("build", 1)
    assert progress.fraction == 1 / 2
    progress.phase_finish("build")  # the last steps need not be told
    assert progress.fraction == 1


NAMES = st.sampled_from(["a", "b", "c"])
EVENTS = st.one_of(
    st.tuples(st.just("phase_start"), NAMES, st.one_of(st.none(), NAMES), st.integers(0, 5)),
    st.tuples(st.just("step_complete"), NAMES, st.integers(0, 9)),
    st.tuples(st.just("phase_finish"), NAMES),
)


@given(st.lists(EVENTS))
def test_progress_stays_within_0_and_1_and_never_goes_back(events: list[tuple[Any, ...]]) -> None:
    progress = Progress()
    before = 0.0
    for method, *arguments in events:
        getattr(progress, method)(*arguments)
        assert before <= progress.fraction <= 1 + 1e-9
        before = progress.fraction


def test_a_cancelled_build_is_stopped_at_its_next_step() -> None:
    progress = Progress()
    progress.phase_start("build", None, 4)
    assert progress.step_complete("build", 0)
    progress.cancelled = True
    assert not progress.step_complete("build", 1)


def test_errors_are_kept_and_the_rest_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    messages = Messages(FAKE)
    for number, text in enumerate(["internal", "error", "warning", "info", "verbose"]):
        messages.logger.log(severity(number), text)
    assert messages.errors == ["internal", "error"]
    levels = {record.message: record.levelno for record in caplog.records}
    assert levels["warning"] == logging.INFO
    assert levels["info"] == logging.DEBUG
    assert "verbose" not in levels


def test_there_is_one_log_for_a_process() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="makes loggers of tensorrt_rtx")
    assert messages_of(trt) is messages_of(trt)
