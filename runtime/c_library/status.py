"""The codes of export_grok.h, and which of them an error comes to."""

from enum import IntEnum

from export_grok.errors import (
    BundleError,
    BusyError,
    CheckpointError,
    ClosedError,
    ConfigError,
    ExportGrokError,
    MissingDependencyError,
    NeedsError,
    RequestError,
)

__all__ = ["FINISHES", "ArgumentError", "Status", "status_and_text"]


class Status(IntEnum):
    """What a call comes to, `eg_status`."""

    OK = 0
    END = 1
    TIMEOUT = 2
    TRUNCATED = 3
    ARGUMENT = -1
    CLOSED = -2
    BUNDLE = -3
    CONFIG = -4
    REQUEST = -5
    BUSY = -6
    ENGINE = -7
    MEMORY = -8
    PYTHON = -9
    INTERNAL = -10


# Of each reason of `FinishReason`: `eg_finish`.
FINISHES = {None: 0, "stop": 1, "length": 2, "cancelled": 3, "error": 4}


class ArgumentError(Exception):
    """What a C program handed in cannot be read: a mistake of that program."""


# The first class that an error is of.
_STATUSES: dict[type[BaseException], Status] = {
    ArgumentError: Status.ARGUMENT,
    ClosedError: Status.CLOSED,
    BusyError: Status.BUSY,
    RequestError: Status.REQUEST,
    BundleError: Status.BUNDLE,
    CheckpointError: Status.BUNDLE,
    ConfigError: Status.CONFIG,
    MissingDependencyError: Status.CONFIG,
    NeedsError: Status.CONFIG,
    ExportGrokError: Status.ENGINE,
    MemoryError: Status.MEMORY,
    OSError: Status.CONFIG,  # too few descriptors, no permission: it cannot be on this machine
}


def status_and_text(error: BaseException) -> tuple[Status, str]:
    """Return the code of an error and what to tell of it."""
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return status, str(error) or _DEFAULT_TEXTS.get(status, type(error).__name__)
    return Status.INTERNAL, f"{type(error).__name__}: {error}; please report this"


_DEFAULT_TEXTS = {Status.MEMORY: "memory ran out; give the model fewer rows, or the host more"}
