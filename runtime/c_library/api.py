"""The functions of the C library that are Python's: handles to models and requests.

`connect` ties each method below to the function `eg_py_...` that library.c calls. Pointers are
there, and structures have the fields of this version; what they hold is checked here. No error
leaves: each comes to a code, with its text for eg_last_error.
"""

import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from time import monotonic
from typing import Any

from export_grok import __version__
from export_grok.errors import ClosedError, ConfigError, MissingDependencyError
from export_grok.runtime.c_library.status import Status, status_and_text
from export_grok.runtime.c_library.values import (
    fill_piece,
    options_of,
    params_of,
    path_of,
    text_of,
    tokens_of,
)
from export_grok.runtime.handle import Handle, Piece
from export_grok.runtime.metrics import PrometheusMetrics
from export_grok.runtime.model import Model, Prompt, load
from export_grok.runtime.observer import Load, Usage

__all__ = ["Library", "connect"]

# That a program may take to end which left models open.
LAST_SECONDS = 60.0


@dataclass(eq=False)
class _Opened:
    model: Model
    metrics: PrometheusMetrics | MissingDependencyError


@dataclass(eq=False)
class _Pulled:
    """A request, how far it was read, and the memory that its last piece points at."""

    handle: Handle
    read: int = 0
    ended: bool = False
    released: bool = False
    kept: tuple[Any, ...] = ()


class Library:
    """All that is open. Each public method is the function of its name in export_grok.h.

    Args:
        ffi: of the compiled module.
        tell: takes a code and a text for eg_last_error, and returns the code.
    """

    def __init__(self, ffi: Any, tell: Callable[[Status, bytes], int]) -> None:
        self._ffi = ffi
        self._tell = tell
        self._numbers = itertools.count(1)  # of both kinds: none is ever used twice
        self._models: dict[int, _Opened] = {}
        self._requests: dict[int, _Pulled] = {}

    def told(self, error: BaseException) -> int:
        """Keep the text of an error for eg_last_error and return its code."""
        status, text = status_and_text(error)
        return self._tell(status, text.encode(errors="replace"))

    def open(self, bundle: Any, options: Any, model: Any) -> int:
        """See `eg_open`."""
        metrics = _metrics()
        opened = load(
            path_of(self._ffi, bundle, "bundle"),
            **options_of(self._ffi, options),
            observers=[metrics] if isinstance(metrics, PrometheusMetrics) else [],
        )
        number = next(self._numbers)
        self._models[number] = _Opened(opened, metrics)
        model[0] = number
        return Status.OK

    def close(self, model: int) -> int:
        """See `eg_close`."""
        opened = self._models.pop(model, None)
        if opened is None:
            raise _closed("model", model)
        opened.model.close()
        return Status.OK

    def close_all(self) -> int:
        """Close every model, for the end of the program, which waits LAST_SECONDS at most.

        An engine that is in the middle of a long turn, or whose library has begun to end, must not
        keep the program from ending.
        """
        left = [self._models.pop(number, None) for number in list(self._models)]
        closing = [
            threading.Thread(target=opened.model.close, daemon=True) for opened in left if opened
        ]
        for thread in closing:
            thread.start()
        deadline = monotonic() + LAST_SECONDS
        for thread in closing:
            thread.join(max(0.0, deadline - monotonic()))
        return Status.OK

    def submit(self, model: int, prompt: Any, params: Any, request: Any) -> int:
        """See `eg_submit`."""
        opened = self._opened(model).model
        return self._submit(opened, text_of(self._ffi, prompt, "prompt"), params, request)

    def submit_tokens(self, model: int, tokens: Any, count: int, params: Any, request: Any) -> int:
        """See `eg_submit_tokens`."""
        opened = self._opened(model).model
        prompt = tokens_of(self._ffi, tokens, count, opened.max_length)
        return self._submit(opened, prompt, params, request)

    def next(self, request: int, timeout_ms: int, piece: Any) -> int:
        """See `eg_next`."""
        pulled = self._pulled(request)
        if pulled.ended:
            error = pulled.handle.error
            return Status.END if error is None else self.told(error)
        found = _piece(pulled.handle, pulled.read, timeout_ms)
        if pulled.released:  # meanwhile: nobody would keep what the piece points at
            raise _closed("request", request)
        if found is None:
            return Status.TIMEOUT
        pulled.kept = fill_piece(self._ffi, found, piece)
        pulled.read += 1
        pulled.ended = found.finish_reason is not None
        return Status.OK

    def cancel(self, request: int) -> int:
        """See `eg_cancel`."""
        self._pulled(request).handle.cancel()
        return Status.OK

    def usage(self, request: int, usage: Any) -> int:
        """See `eg_usage`."""
        _fill(usage, self._pulled(request).handle.usage)
        return Status.OK

    def release(self, request: int) -> int:
        """See `eg_release`."""
        pulled = self._requests.pop(request, None)
        if pulled is None:
            raise _closed("request", request)
        pulled.released = True
        pulled.handle.cancel()
        return Status.OK

    def load(self, model: int, out: Any) -> int:
        """See `eg_load`."""
        _fill(out, self._opened(model).model.current_load())
        return Status.OK

    def metrics(self, model: int, buffer: Any, capacity: int, length: Any) -> int:
        """See `eg_metrics`."""
        metrics = self._opened(model).metrics
        if isinstance(metrics, MissingDependencyError):
            return self.told(metrics)
        text = metrics.text().encode()
        length[0] = len(text)
        if len(text) >= capacity:
            return Status.TRUNCATED
        self._ffi.memmove(buffer, text + b"\0", len(text) + 1)
        return Status.OK

    def _submit(self, model: Model, prompt: Prompt, params: Any, request: Any) -> int:
        handle = model.submit(prompt, params_of(self._ffi, params, model.config.vocab_size))
        number = next(self._numbers)
        self._requests[number] = _Pulled(handle)
        request[0] = number
        return Status.OK

    def _opened(self, model: int) -> _Opened:
        opened = self._models.get(model)
        if opened is None:
            raise _closed("model", model)
        return opened

    def _pulled(self, request: int) -> _Pulled:
        pulled = self._requests.get(request)
        if pulled is None:
            raise _closed("request", request)
        return pulled


def connect(made: Any, version: str) -> None:
    """Tie the functions of a library to Python's.

    Args:
        made: the compiled module, with its `ffi` and `lib`.
        version: of this package when the library was made.

    Raises:
        ConfigError: this package is another version.
    """
    if version != __version__:
        raise ConfigError(
            f"the library was made with export-grok {version}, and {__version__} is installed"
        )
    library = Library(made.ffi, made.lib.eg_tell_text)
    for function in (
        *(library.open, library.close, library.close_all),
        *(library.submit, library.submit_tokens, library.next, library.cancel, library.usage),
        *(library.release, library.load, library.metrics),
    ):
        made.ffi.def_extern(
            name=f"eg_py_{function.__name__}",
            error=Status.INTERNAL,
            onerror=lambda kind, error, trace: library.told(error),  # before ours is entered
        )(_guarded(library, function))


def _guarded(library: Library, function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def guarded(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except BaseException as error:  # whatever it is, C gets a code
            return library.told(error)

    return guarded


def _metrics() -> PrometheusMetrics | MissingDependencyError:
    try:
        return PrometheusMetrics()
    except MissingDependencyError as error:
        return error


def _piece(handle: Handle, number: int, timeout_ms: int) -> Piece | None:
    """Wait for a piece by its number: below 0 without end; return None if it did not come."""
    timeout = None if timeout_ms < 0 else min(timeout_ms / 1000, threading.TIMEOUT_MAX)
    return handle.piece(number, timeout)


def _fill(out: Any, values: Usage | Load) -> None:
    for field in fields(values):
        setattr(out, field.name, getattr(values, field.name))


def _closed(kind: str, number: int) -> ClosedError:
    return ClosedError(f"{number} is no {kind} that is open; it was closed, or never was")
