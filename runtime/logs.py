"""Structured logs of a model at work: one record an event, with what it says as fields.

No text and no token of a prompt or an answer is in them, only counts and times: logs are kept
longer, and read by more people, than what was asked. So of an error that is about the request
there is its class alone: the message is for who asked, and may quote what was asked.
"""

import dataclasses
import json
import logging
from datetime import UTC, datetime
from typing import Any

from export_grok.errors import ExportGrokError, RequestError
from export_grok.runtime.observer import FinishReason, Load, Usage

__all__ = ["JsonFormatter", "LogObserver"]

# What every record has; all else on one came in by `extra`.
STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime"}


class LogObserver:
    """An `Observer` that writes a record for each event of a request, and for each turn.

    What ends is told at INFO, what ends by an error at WARNING if the request was at fault and at
    ERROR if not; all between at DEBUG. Single tokens are not told.

    The logger's handlers run in the model's thread, and keep all streams waiting: put a slow one
    behind `logging.handlers.QueueHandler`.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        """Write to `logger`; to "export_grok.runtime" if None."""
        self._logger = logging.getLogger("export_grok.runtime") if logger is None else logger

    def submitted(self, request: str, *, prompt_tokens: int) -> None:
        """See `Observer`."""
        self._logger.debug(
            "request submitted", extra={"request": request, "prompt_tokens": prompt_tokens}
        )

    def refused(self, error: Exception) -> None:
        """See `Observer`."""
        self._logger.info("request refused", extra=_of_error(error))

    def started(self, request: str, *, waited_seconds: float, cached_tokens: int) -> None:
        """See `Observer`."""
        self._logger.debug(
            "request started",
            extra={
                "request": request,
                "waited_seconds": _rounded(waited_seconds),
                "cached_tokens": cached_tokens,
            },
        )

    def token(self, request: str, *, seconds: float, first: bool) -> None:
        """See `Observer`."""

    def finished(
        self, request: str, *, reason: FinishReason, usage: Usage, error: Exception | None
    ) -> None:
        """See `Observer`."""
        fields = {
            "request": request,
            "finish_reason": reason,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "new_tokens": usage.new_tokens,
            "waited_seconds": _rounded(usage.waited_seconds),
            "first_token_seconds": _rounded(usage.first_token_seconds),
            "decode_seconds": _rounded(usage.decode_seconds),
            "tokens_per_second": _rounded(usage.tokens_per_second),
        }
        if error is None:
            self._logger.info("request finished", extra=fields)
            return
        level = logging.WARNING if isinstance(error, RequestError) else logging.ERROR
        # One that was foreseen has a class of its own, and says what to do: no traceback.
        foreseen = isinstance(error, ExportGrokError) and type(error) is not ExportGrokError
        self._logger.log(
            level,
            "request finished",
            extra=fields | _of_error(error),
            exc_info=None if foreseen else error,
        )

    def stepped(self, load: Load, *, seconds: float, prefilled: int, decoded: int) -> None:
        """See `Observer`."""
        if self._logger.isEnabledFor(logging.DEBUG):
            turn = {"seconds": _rounded(seconds), "prefilled": prefilled, "decoded": decoded}
            self._logger.debug("turn", extra=turn | dataclasses.asdict(load))

    def changed(self, load: Load) -> None:
        """See `Observer`."""


class JsonFormatter(logging.Formatter):
    """Makes one JSON object in one line of a record, with its fields beside its message.

    `time` is in UTC, as ISO 8601 has it; a traceback is a string, `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end; what JSON has no form for, as Python shows it."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in STANDARD:
                line.setdefault(name, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


def _of_error(error: Exception) -> dict[str, str]:
    fields = {"error": type(error).__name__}
    if not isinstance(error, RequestError):
        fields["error_message"] = str(error)
    return fields


def _rounded(value: float) -> float:
    """Return it to the microsecond: what is behind that is noise."""
    return round(value, 6)
