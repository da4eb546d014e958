"""One request under Triton: a thread that sends its answer, and the word that it is not wanted."""

import contextlib
import threading
from collections.abc import Callable

from export_grok.errors import ExportGrokError
from export_grok.runtime.handle import Handle
from export_grok.runtime.triton_server.answer import Part, error_response, parts_of, response
from export_grok.runtime.triton_server.api import Response, Sender, Utils

__all__ = ["Exchange", "send_last"]


def send_last(utils: Utils, sender: Sender, last: Response) -> None:
    """Send the last response of a request; its sender is of no use behind it."""
    sender.send(last, flags=utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


class Exchange:
    """An answer on its way, sent by a thread of its own.

    Args:
        utils: Triton's.
        sender: of the request.
        handle: of the answer.
        stream: whether every piece is sent as it comes.
        texts: whether the bundle has texts.
        ended: called with this once the last response was sent, or could not be.
    """

    def __init__(
        self,
        utils: Utils,
        sender: Sender,
        handle: Handle,
        *,
        stream: bool,
        texts: bool,
        ended: Callable[["Exchange"], None],
    ) -> None:
        self._utils = utils
        self._sender = sender
        self._handle = handle
        self._stream = stream
        self._texts = texts
        self._ended = ended
        # Triton frees what `is_cancelled` looks at when the last response comes.
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(
            target=self._run, name=f"export-grok answer {handle.id}", daemon=True
        )

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def look(self) -> None:
        """Cancel the answer if nobody waits for it any more."""
        with self._lock:
            gone = self._open and self._sender.is_cancelled()
        if gone:
            self._handle.cancel()

    def join(self, timeout: float) -> None:
        """Wait until all was sent."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            pieces = self._handle.pieces()
            for part in parts_of(pieces, stream=self._stream, texts=self._texts):
                self._send(part)
        except Exception as error:  # of Triton's: the server is gone, or knows no such request
            self._handle.cancel()
            self._utils.Logger.log_error(f"export-grok, request {self._handle.id}: {error!r}")
            with contextlib.suppress(Exception):
                self._send_last(error_response(self._utils, error))
        finally:
            self._ended(self)

    def _send(self, part: Part) -> None:
        if not part.last:
            self._sender.send(response(self._utils, part, self._handle.usage))
            return
        self._send_last(self._last(part))

    def _send_last(self, last: Response) -> None:
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            send_last(self._utils, self._sender, last)

    def _last(self, part: Part) -> Response:
        """Return the last response: the last part, or what kept the answer from its end."""
        utils, reason = self._utils, part.pieces[-1].finish_reason
        if reason == "error":
            return error_response(
                utils, self._handle.error or ExportGrokError("no reason is told")
            )
        if reason == "cancelled":
            said = f"request {self._handle.id} was cancelled"
            return utils.InferenceResponse(
                error=utils.TritonError(said, utils.TritonError.CANCELLED)
            )
        return response(utils, part, self._handle.usage)
