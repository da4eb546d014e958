"""The thread that has the session: it takes requests on, turns the loop, and hands pieces out.

All that a session is bound to, a GPU's context or the processes of ranks, belongs to the thread
that opened it, so one thread opens, runs and closes it.
"""

import atexit
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from time import perf_counter

from export_grok.engines.backend import RowSession
from export_grok.errors import BusyError, ClosedError, ExportGrokError
from export_grok.runtime.admission import Limits
from export_grok.runtime.batching.answer import Answer
from export_grok.runtime.batching.batch import Batch, Token
from export_grok.runtime.handle import Handle
from export_grok.runtime.observer import FinishReason, Load, Observer
from export_grok.runtime.work import Work

__all__ = ["EngineThread"]


class EngineThread:
    """Runs requests on a session until it is closed.

    Args:
        open_session: opens the session; it is called, and closed, in this thread.
        limits: of what may be under way.
        observer: of everything.

    Raises:
        ExportGrokError: the session did not open.
    """

    def __init__(
        self,
        open_session: Callable[[], AbstractContextManager[RowSession]],
        *,
        limits: Limits,
        observer: Observer,
    ) -> None:
        self._open_session = open_session
        self._limits = limits
        self._observer = observer
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._new: list[Work] = []
        self._cancelled: set[Handle] = set()
        self._works: dict[Handle, Work] = {}
        self._load: Load | None = None
        self._closing = False
        self._failure: BaseException | None = None
        # Of the thread alone.
        self._by_answer: dict[Answer, Work] = {}

        self._thread = threading.Thread(target=self._run, name="export-grok engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._load or self._failure)
        except BaseException:  # Ctrl-C: what is half open is closed
            self.close()
            raise
        if self._failure is not None:
            self.close()
            raise self._failure

    def submit(self, work: Work, *, wait: bool, timeout: float | None) -> Handle:
        """Take a request on and return its handle.

        Args:
            work: of the request.
            wait: for room, if too many wait already.
            timeout: seconds to wait; without end by default.

        Raises:
            BusyError: too many wait, or still do after the timeout.
            ClosedError: this was closed, or an error ended it.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._ended or not self._refusal(work), timeout)
            self._check_open()
            if refusal := self._refusal(work):
                raise refusal
            self._works[work.handle] = work
            self._new.append(work)
            self._changed.notify_all()
        return work.handle

    def cancel(self, handle: Handle) -> None:
        """End a request after the turn that is being computed."""
        with self._changed:
            if handle in self._works:
                self._cancelled.add(handle)
                self._changed.notify_all()

    def load(self) -> Load:
        """Return how busy the model is; requests that came since the last turn wait."""
        with self._changed:
            if self._load is None:
                raise AssertionError("a session that opened has a load")
            return dataclasses.replace(self._load, waiting=self._load.waiting + len(self._new))

    def close(self) -> None:
        """Cancel all that is under way and close the session. May be called again."""
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # What follows is called with the condition held.

    @property
    def _ended(self) -> bool:
        return self._closing or self._failure is not None

    def _check_open(self) -> None:
        if self._failure is not None:
            raise ClosedError(
                f"the model was ended by an error ({self._failure}); load it again"
            ) from self._failure
        if self._closing:
            raise ClosedError("the model is closed; load it again")

    def _refusal(self, work: Work) -> BusyError | None:
        prompts = [other.prompt_tokens for other in self._works.values()]
        return self._limits.refusal(prompts, work.prompt_tokens)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            with self._open_session() as session:
                self._serve(session)
        except BaseException as error:  # whatever it is, who waits must hear of it
            with self._changed:
                self._failure = error
        self._end_all()

    def _serve(self, session: RowSession) -> None:
        batch = Batch(
            session,
            chunk=self._limits.chunk,
            budget=self._limits.chunk,
            on_start=lambda answer: self._by_answer[answer].started(self._observer),
        )
        self._tell(batch.load())
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._new or self._cancelled or not batch.idle
                )
                if self._closing:
                    return
                new, self._new = self._new, []
                cancelled = [
                    self._works[handle] for handle in self._cancelled if handle in self._works
                ]
                self._cancelled = set()
            for work in new:
                self._observer.submitted(work.handle.id, prompt_tokens=work.prompt_tokens)
                self._by_answer[work.answer] = work
                batch.add(work.answer)
            for work in cancelled:
                batch.end(work.answer, "cancelled")
                work.finish("cancelled", self._observer)
            if cancelled:
                self._observer.changed(batch.load())
                self._tell(batch.load(), cancelled)
            if not batch.idle:
                self._tell(*self._turn(batch))

    def _turn(self, batch: Batch) -> tuple[Load, list[Work]]:
        """Return the load behind a turn, and whose answers went on or ended in it."""
        began = perf_counter()
        turn = batch.turn()
        changed = []
        for token in turn.tokens:
            work = self._by_answer[token.answer]
            reason, error = self._taken(work, token)
            if reason is not None:
                batch.end(work.answer, reason)
                work.finish(reason, self._observer, error)
            changed.append(work)
        load = batch.load()
        self._observer.stepped(
            load,
            seconds=perf_counter() - began,
            prefilled=turn.prefilled,
            decoded=turn.decoded,
        )
        return load, changed

    def _taken(
        self, work: Work, token: Token
    ) -> tuple[FinishReason | None, ExportGrokError | None]:
        try:
            if work.take(token, self._observer):
                return "stop", None
        except ExportGrokError as error:
            return "error", error
        return token.finished, token.error

    def _tell(self, load: Load, changed: Iterable[Work] = ()) -> None:
        """Hand out what is new of answers; those that ended have given their places back."""
        with self._changed:
            self._load = load
            for work in changed:
                if work.ended:
                    del self._works[work.handle], self._by_answer[work.answer]
            self._changed.notify_all()
        for work in changed:
            work.publish()

    def _end_all(self) -> None:
        with self._changed:
            works, self._works = list(self._works.values()), {}
            new, self._new = set(self._new), []
            failure = self._failure
            self._by_answer = {}
            if self._load is not None:
                self._load = dataclasses.replace(
                    self._load, running=0, waiting=0, cache_tokens=0, kept_tokens=0
                )
            self._changed.notify_all()
        for work in works:
            # An observer that fails, maybe not for the first time, keeps nobody waiting.
            with contextlib.suppress(Exception):
                if work in new:
                    self._observer.submitted(work.handle.id, prompt_tokens=work.prompt_tokens)
                if not work.ended:
                    error = None if failure is None else _told(failure)
                    work.finish("error" if error else "cancelled", self._observer, error)
            work.publish()
        if self._load is not None:
            with contextlib.suppress(Exception):
                self._observer.changed(self._load)


def _told(failure: BaseException) -> ExportGrokError:
    if isinstance(failure, ExportGrokError):
        return failure
    told = ExportGrokError(f"the engine failed: {failure!r}; load the model again")
    told.__cause__ = failure
    return told
