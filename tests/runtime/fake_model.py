"""A model whose session is made up, and stops where a test wants it to."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from export_grok.artifacts import Bundle
from export_grok.engines.backend import RowSession
from export_grok.runtime.admission import Limits
from export_grok.runtime.batching.batch import CHUNK
from export_grok.runtime.engine_thread import EngineThread
from export_grok.runtime.model import Model
from export_grok.runtime.observer import Observer, Observers
from export_grok.runtime.text.tokenizer import tokenizer_of
from tests.runtime.fake_session import FakeSession

__all__ = ["StoppedSession", "model_of", "session_of"]


def session_of(bundle: Bundle, *, batch: int = 2, max_length: int = 64, **options: Any) -> Any:
    """Return a made-up session of a bundle's sizes."""
    return FakeSession(bundle.config, batch=batch, max_length=max_length, **options)


class StoppedSession(FakeSession):
    """A fake that computes nothing until it is let: call by call, or from now on.

    Attributes:
        entered: set while a call waits.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.entered = threading.Event()
        self._calls = threading.Semaphore(0)
        self._open = False

    def let(self, calls: int) -> None:
        """Let so many calls through."""
        self._calls.release(calls)

    def let_all(self) -> None:
        """Let all calls through from now on."""
        self._open = True
        self._calls.release()

    def forward(self, *arguments: Any) -> Any:
        """See `FakeSession`."""
        if not self._open:
            self.entered.set()
            assert self._calls.acquire(timeout=20), "the test has failed, or does not let it go"
            self.entered.clear()
        return super().forward(*arguments)


def model_of(
    bundle: Bundle,
    session: RowSession,
    *,
    chunk: int = CHUNK,
    max_waiting: int = 64,
    max_waiting_tokens: int | None = None,
    observers: Sequence[Observer] = (),
) -> Model:
    """Return a model that runs on a session; close it."""

    @contextmanager
    def opened() -> Iterator[RowSession]:
        yield session

    observer = Observers(observers)
    engine = EngineThread(
        opened,
        limits=Limits(
            batch=session.batch,
            chunk=chunk,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
        ),
        observer=observer,
    )
    return Model(
        bundle,
        engine,
        tokenizer=tokenizer_of(bundle) if bundle.tokenizer is not None else None,
        batch=session.batch,
        max_length=session.max_length,
        observer=observer,
    )
