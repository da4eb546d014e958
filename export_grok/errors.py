"""What can go wrong, sorted by what the caller can do about it.

Every message says what was wrong with its value, what would be right, and what to do.
"""

from collections.abc import Sequence

__all__ = [
    "BuildError",
    "BundleError",
    "BusyError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "ExportGrokError",
    "MissingDependencyError",
    "NeedsError",
    "NumericsError",
    "OutputError",
    "RankError",
    "RequestError",
    "UnsafePickleError",
    "VerificationError",
]


class ExportGrokError(Exception):
    """Base of every error that a user can act on; the command line prints no traceback of it."""

    exit_code = 1


class ConfigError(ExportGrokError):
    """The hyper-parameters, or an option, have a value that cannot work: choose another."""

    exit_code = 2


class CheckpointError(ExportGrokError):
    """The weights are missing, damaged or not those of this config: get the right files.

    Attributes:
        faults: one line for each fault found, all of them.
    """

    exit_code = 2

    def __init__(self, summary: str, faults: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([summary, *faults]))
        self.faults = tuple(faults)


class UnsafePickleError(CheckpointError):
    """A weight file asks for something that is no array: do not trust where it came from."""


class BundleError(ExportGrokError):
    """A built folder is unfinished, damaged, moved or of another kind: build it again."""

    exit_code = 2


class RequestError(ExportGrokError):
    """A prompt or a sampling parameter is outside its range: change the request."""

    exit_code = 2


class BusyError(ExportGrokError):
    """As many requests wait as may: submit it later, or wait for room."""


class ClosedError(ExportGrokError):
    """What was asked is closed, or was ended by an error: open it again."""


class BuildError(ExportGrokError):
    """A stage could not make what it was asked for."""


class OutputError(ExportGrokError):
    """The output cannot be written: another place, or more room."""


class NeedsError(ExportGrokError):
    """There is too little disk, memory or GPU memory for the work: make room, or force it."""

    exit_code = 2


class RankError(ExportGrokError):
    """One of the processes that share a model died, stalled or went its own way: run again.

    Attributes:
        rank: its number.
    """

    def __init__(self, text: str, *, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class NumericsError(ExportGrokError):
    """The engine produced a value that is no number."""


class VerificationError(ExportGrokError):
    """An engine or its weights are not what they are held to: do not use them."""


class MissingDependencyError(ExportGrokError):
    """A package that only some stages need is not installed."""
