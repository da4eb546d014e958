"""Each event is one record with its fields; what was asked and answered is in none."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from export_grok.errors import ExportGrokError, NumericsError, RequestError
from export_grok.runtime.logs import STANDARD, JsonFormatter, LogObserver
from tests.documents import ROOT
from tests.runtime.events import SECRET, USAGES, tell


class Records(logging.Handler):
    """Keeps what is logged, as lines of JSON too."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter())
        self.records: list[logging.LogRecord] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.lines.append(self.format(record))

    def fields(self, number: int = -1) -> dict[str, Any]:
        record = self.records[number]
        return {name: value for name, value in vars(record).items() if name not in STANDARD}


@pytest.fixture
def logger() -> logging.Logger:
    found = logging.getLogger("a service")
    found.setLevel(logging.DEBUG)
    found.propagate = False
    return found


@pytest.fixture
def records(logger: logging.Logger) -> Iterator[Records]:
    handler = Records()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_each_event_is_one_record_with_its_level_and_a_fixed_message(
    logger: logging.Logger, records: Records
) -> None:
    tell(LogObserver(logger))
    found = [(record.levelname, record.getMessage()) for record in records.records]
    for level, message, number in (
        ("DEBUG", "request submitted", 3),
        ("DEBUG", "request started", 3),
        ("DEBUG", "turn", 3),
        ("INFO", "request refused", 2),
        ("INFO", "request finished", 3),
    ):
        assert found.count((level, message)) == number
    assert len(found) == 14


def test_a_finished_request_is_told_with_what_it_took(
    logger: logging.Logger, records: Records
) -> None:
    LogObserver(logger).finished("b", reason="length", usage=USAGES[1], error=None)
    assert records.fields() == {
        "request": "b",
        "finish_reason": "length",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "new_tokens": 3,
        "waited_seconds": 0.0,
        "first_token_seconds": 0.5,
        "decode_seconds": 0.5,
        "tokens_per_second": 4.0,
    }


def test_a_turn_is_told_with_the_load_behind_it(logger: logging.Logger, records: Records) -> None:
    tell(LogObserver(logger), until=12)
    assert records.fields() == {
        "seconds": 0.5,
        "prefilled": 8,
        "decoded": 0,
        "batch": 2,
        "running": 2,
        "waiting": 1,
        "cache_tokens": 12,
        "kept_tokens": 0,
        "capacity": 64,
    }


def test_the_document_has_the_fields_and_the_level_of_each_message(
    logger: logging.Logger, records: Records
) -> None:
    tell(LogObserver(logger))
    found: dict[str, tuple[str, set[str]]] = {}
    for number, record in enumerate(records.records):
        level, names = found.setdefault(record.getMessage(), (record.levelname, set()))
        assert level == record.levelname
        names |= set(records.fields(number))
    document = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z ]+)` \| ([A-Z]+) \| (.*) \|$", document, re.MULTILINE)
    assert found == {
        message: (level, set(re.findall(r"`(\w+)`", names))) for message, level, names in rows
    }


def test_at_info_only_ends_and_refusals_are_told(logger: logging.Logger, records: Records) -> None:
    logger.setLevel(logging.INFO)
    tell(LogObserver(logger))
    assert {record.getMessage() for record in records.records} == {
        "request refused",
        "request finished",
    }


def error_raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "level", "fields", "traceback"),
    [
        (RequestError(SECRET), "WARNING", {"error": "RequestError"}, False),
        (
            NumericsError("logits are no numbers"),
            "ERROR",
            {"error": "NumericsError", "error_message": "logits are no numbers"},
            False,
        ),
        (
            ExportGrokError("the engine failed"),
            "ERROR",
            {"error": "ExportGrokError", "error_message": "the engine failed"},
            True,
        ),
        (
            ZeroDivisionError("a mistake"),
            "ERROR",
            {"error": "ZeroDivisionError", "error_message": "a mistake"},
            True,
        ),
    ],
)
def test_an_error_is_told_by_whose_it_is(
    logger: logging.Logger,
    records: Records,
    error: Exception,
    level: str,
    fields: dict[str, str],
    traceback: bool,
) -> None:
    raised = error_raised(error)
    LogObserver(logger).finished("a", reason="error", usage=USAGES[0], error=raised)
    assert records.records[-1].levelname == level
    found = records.fields()
    assert found["finish_reason"] == "error"
    assert {name: text for name, text in found.items() if name.startswith("error")} == fields
    line = json.loads(records.lines[-1])
    assert ("error_raised" in line.get("traceback", "")) == traceback


def test_what_was_asked_is_in_no_record(logger: logging.Logger, records: Records) -> None:
    observer = LogObserver(logger)
    tell(observer)  # a refusal whose message quotes the prompt is among them
    refusal = error_raised(RequestError(f"{SECRET!r} is no stop string"))
    observer.finished("a", reason="error", usage=USAGES[0], error=refusal)
    assert len(records.lines) == 15
    for word in ("password", "swordfish"):
        assert word in SECRET
        assert not any(word in line for line in records.lines)
        assert not any(word in str(vars(record)) for record in records.records)


def test_the_logger_is_the_runtimes_unless_one_is_given(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="export_grok.runtime"):
        tell(LogObserver())
    assert {record.name for record in caplog.records} == {"export_grok.runtime"}
    assert len(caplog.records) == 5


def test_a_record_is_one_line_of_json_whatever_is_in_it(
    logger: logging.Logger, records: Records
) -> None:
    fields = {"where": "a\u2028b\ud800", "what": object, "many": [1, 2.5]}
    logger.warning("two\nlines of %s", "text", extra=fields)
    (text,) = records.lines[-1].splitlines()
    text.encode()
    line = json.loads(text)
    assert line.pop("time")
    assert line == {
        "level": "WARNING",
        "logger": "a service",
        "message": "two\nlines of text",
        "where": "a\u2028b\ud800",
        "what": repr(object),
        "many": [1, 2.5],
    }


def test_a_field_hides_nothing_of_the_record(logger: logging.Logger, records: Records) -> None:
    logger.warning("told", extra={"level": "low", "logger": "of wood"})
    line = json.loads(records.lines[-1])
    assert (line["level"], line["logger"]) == ("WARNING", "a service")


def test_time_is_utc() -> None:
    record = logging.makeLogRecord({"created": 86400.5, "msg": "a day"})
    line = json.loads(JsonFormatter().format(record))
    assert line["time"] == "1970-01-02T00:00:00.500+00:00"
