"""The engine's thread: many at once, each with an end, whatever becomes of the others."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from export_grok.artifacts import Bundle
from export_grok.errors import (
    BundleError,
    BusyError,
    ClosedError,
    ExportGrokError,
    NumericsError,
)
from export_grok.runtime import GenerationParams, Piece
from export_grok.runtime.admission import Limits
from export_grok.runtime.engine_thread import EngineThread
from export_grok.runtime.observer import Observers
from tests.runtime.fake_model import StoppedSession, model_of, session_of
from tests.runtime.fake_session import broken_after

SHORT = GenerationParams(max_new_tokens=6, ignore_eos=True)
LONG = GenerationParams(ignore_eos=True)


# Many at once.


def test_more_than_may_wait_are_refused_with_the_figures(
    demo: Bundle, stopped: StoppedSession
) -> None:
    with model_of(demo, stopped, max_waiting=3) as model:
        handles = [model.submit([5, 6], SHORT) for _ in range(5)]
        with pytest.raises(BusyError, match=r"tokens wait for 2 rows.*3 may wait"):
            model.submit([5], SHORT)
        with pytest.raises(BusyError):
            model.submit([5], SHORT, wait=True, timeout=0.01)
        stopped.let_all()
        assert {handle.result().finish_reason for handle in handles} == {"length"}
        model.submit([5], SHORT).result()  # there is room again


def test_tokens_that_wait_are_bounded_too(demo: Bundle, stopped: StoppedSession) -> None:
    with model_of(demo, stopped, max_waiting_tokens=10) as model:
        for _ in range(2):
            model.submit([5] * 20, SHORT)  # a row is free: nothing waits
        stopped.entered.wait()
        model.submit([5] * 7, SHORT)
        with pytest.raises(BusyError, match="of 10 tokens together"):
            model.submit([5] * 4, SHORT)
        model.submit([5] * 3, SHORT)
        stopped.let_all()


def test_who_waits_for_room_gets_it(demo: Bundle, stopped: StoppedSession) -> None:
    with model_of(demo, stopped, max_waiting=0) as model:
        first = [model.submit([5], SHORT) for _ in range(2)]
        threading.Timer(0.05, stopped.let_all).start()
        late = model.submit([7], SHORT, wait=True)
        assert any(handle.done for handle in first)
        assert late.result().finish_reason == "length"


def test_threads_may_submit_cancel_and_read_at_once(demo: Bundle) -> None:
    wrong: list[object] = []
    with model_of(demo, session_of(demo, batch=3), max_waiting=100) as model:
        wanted = {n: model.generate([[n, 5]], SHORT)[0].tokens for n in range(1, 9)}

        def client(n: int) -> None:
            for turn in range(20):
                handle = model.submit([n, 5], SHORT)
                if turn % 3 == n % 3:
                    handle.cancel()
                result = handle.result()
                good = result.tokens == wanted[n][: len(result.tokens)]
                whole = len(result.tokens) == 6 or result.finish_reason == "cancelled"
                if not (good and whole):
                    wrong.append(result)

        clients = [threading.Thread(target=client, args=(n,)) for n in range(1, 9)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        load = model.current_load()
    assert wrong == []
    assert (load.running, load.waiting, load.cache_tokens) == (0, 0, 0)


# Cancelling.


def test_a_cancelled_answer_ends_with_what_it_has(demo: Bundle, stopped: StoppedSession) -> None:
    with model_of(demo, stopped) as model:
        handle = model.submit("The lamp", LONG)
        stopped.let(3)
        pieces = iter(handle)
        for _ in range(3):
            next(pieces)
        handle.cancel()
        stopped.let(1)  # the turn that was under way is computed to its end
        result = handle.result()
        assert result.finish_reason == "cancelled"
        assert 3 <= len(result.tokens) <= 4
        handle.cancel()
        assert model.current_load().running == 0


def test_a_request_that_waits_can_be_cancelled(demo: Bundle, stopped: StoppedSession) -> None:
    with model_of(demo, stopped) as model:
        running = [model.submit([5], SHORT) for _ in range(2)]
        waiting = model.submit([6], SHORT)
        waiting.cancel()
        stopped.let(1)
        assert waiting.result().finish_reason == "cancelled"
        assert waiting.result().tokens == ()
        assert not any(handle.done for handle in running)
        stopped.let_all()


def test_a_stream_that_nobody_takes_any_more_is_cancelled(demo: Bundle) -> None:
    with model_of(demo, session_of(demo, max_length=200)) as model:
        for _ in model.stream("The lamp", LONG):
            break
        gc.collect()
        wait_for(lambda: model.current_load().running == 0)


def test_closing_cancels_what_is_under_way(demo: Bundle, stopped: StoppedSession) -> None:
    model = model_of(demo, stopped)
    handles = [model.submit([5], LONG) for _ in range(4)]
    stopped.let(3)
    next(iter(handles[0]))
    threading.Timer(0.05, stopped.let_all).start()
    model.close()
    assert {handle.result().finish_reason for handle in handles} == {"cancelled"}
    model.close()
    with pytest.raises(ClosedError, match="closed"):
        model.submit([5])
    load = model.current_load()
    assert (load.running, load.waiting) == (0, 0)


# Errors.


def test_an_error_of_one_answer_is_its_own(demo: Bundle) -> None:
    session = session_of(demo, logits_of=broken_after(4, begins=2))
    with model_of(demo, session) as model:
        good, bad = model.submit([1, 9], SHORT), model.submit([2, 9], SHORT)
        with pytest.raises(NumericsError, match="step 2"):
            bad.result()
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, NumericsError)
        assert len(bad.partial().tokens) == 2
        pieces: list[Piece] = []
        with pytest.raises(NumericsError):
            pieces.extend(bad)
        assert good.result().finish_reason == "length"
        with pytest.raises(NumericsError):
            model.generate([[2, 9], [1, 9]], SHORT)
        wait_for(lambda: model.current_load().running == 0)


def test_an_error_of_the_engine_ends_all_and_is_told_to_each(
    demo: Bundle, stopped: StoppedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_of(demo, stopped) as model:
        handles = [model.submit([5], SHORT) for _ in range(3)]
        stopped.let(2)
        next(iter(handles[0]))

        def fail(*arguments: Any) -> Any:
            raise BundleError("the disk is gone")

        monkeypatch.setattr(stopped, "forward", fail)
        stopped.let_all()
        for handle in handles:
            with pytest.raises(BundleError, match="the disk is gone"):
                handle.result()
        with pytest.raises(ClosedError, match=r"the disk is gone.*load it again"):
            model.submit([5])


def test_an_error_that_nobody_foresaw_reaches_who_waits(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(demo)
    monkeypatch.setattr(session, "forward", lambda *arguments: 1 / 0)
    with model_of(demo, session) as model:
        handle = model.submit([5], SHORT)
        with pytest.raises(ExportGrokError, match="ZeroDivisionError") as error:
            handle.result()
        assert isinstance(error.value.__cause__, ZeroDivisionError)


class Failing(Observers):
    """An observer that fails from some call on."""

    def __init__(self, method: str) -> None:
        super().__init__(())
        setattr(self, method, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise ValueError("no more disk for logs")


@pytest.mark.parametrize("method", ["submitted", "started", "token", "finished", "stepped"])
def test_an_observer_that_fails_keeps_nobody_waiting(demo: Bundle, method: str) -> None:
    with model_of(demo, session_of(demo), observers=[Failing(method)]) as model:
        handles = [model.submit([5, 1], SHORT)]
        with contextlib.suppress(ClosedError):
            handles += [model.submit([5, n], SHORT) for n in (2, 3)]
        for handle in handles:
            with contextlib.suppress(ExportGrokError):
                handle.result(timeout=20)
        with pytest.raises(ClosedError, match="no more disk"):
            model.submit([5])


def test_a_session_that_does_not_open_is_told_and_leaves_no_thread(demo: Bundle) -> None:
    @contextmanager
    def broken() -> Iterator[Any]:
        raise BundleError("no such graph")
        yield

    with pytest.raises(BundleError, match="no such graph"):
        EngineThread(
            broken, limits=Limits(batch=1, chunk=1, max_waiting=1), observer=Observers(())
        )
    assert "export-grok engine" not in {thread.name for thread in threading.enumerate()}


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)
