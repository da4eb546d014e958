"""What TensorRT calls while it works: a log, and a monitor of a build's progress.

It calls them from threads of its own and through C++, so they keep what they are told and raise
nothing.
"""

import functools
import logging
import threading
from dataclasses import dataclass
from typing import Any

from export_grok.engines.trt.api import Logger, Member, ProgressMonitor, TensorRT

logger = logging.getLogger(__name__)

__all__ = ["Messages", "Progress", "messages_of"]

# Numbers of ILogger.Severity.
ERROR, WARNING, INFO = 1, 2, 3


class Messages:
    """What TensorRT says: to our log, and its errors kept for who asks.

    Attributes:
        logger: what TensorRT takes.
        errors: since they were last cleared.
    """

    def __init__(self, trt: TensorRT) -> None:
        """Make the logger."""
        self.errors: list[str] = []
        self.logger: Logger = _instance(trt.ILogger, log=self.log)

    def log(self, severity: Member, text: str) -> None:
        """Take one message."""
        level = int(severity)
        if level <= ERROR:
            self.errors.append(text)
        if level <= INFO:
            logger.log(logging.INFO if level <= WARNING else logging.DEBUG, "%s", text)


@functools.cache
def messages_of(trt: TensorRT) -> Messages:
    """Return the one log of this process.

    TensorRT keeps the first logger that it is given, for as long as anything made with it lives,
    and ignores another: a second one that outlives the first ends in a segmentation fault.
    """
    return Messages(trt)


@dataclass(kw_only=True)
class _Span:
    """What part of the whole a phase is, how many steps it has, and how many are done."""

    start: float
    length: float
    steps: int
    done: int = 0


class Progress:
    """How far a build is.

    Attributes:
        fraction: done, of 1.
        cancelled: set it, and the build ends at its next step.
    """

    def __init__(self) -> None:
        """Stand at the start."""
        self.fraction = 0.0
        self.cancelled = False
        self._phases: dict[str, _Span] = {}
        self._lock = threading.Lock()

    def monitor(self, trt: TensorRT) -> ProgressMonitor:
        """Return what TensorRT takes."""
        made: ProgressMonitor = _instance(
            trt.IProgressMonitor,
            phase_start=self.phase_start,
            step_complete=self.step_complete,
            phase_finish=self.phase_finish,
        )
        return made

    def phase_start(self, name: str, parent: str | None, steps: int) -> None:
        """Begin a phase: it is one step of its parent, or everything."""
        with self._lock:
            whole = self._phases.get(parent or "") or _Span(start=0.0, length=1.0, steps=1)
            length = whole.length / whole.steps
            start = whole.start + length * min(whole.done, whole.steps - 1)
            self._phases[name] = _Span(start=start, length=length, steps=max(1, steps))

    def step_complete(self, name: str, step: int) -> bool:
        """Take a step as done; return whether to go on."""
        with self._lock:
            if phase := self._phases.get(name):
                phase.done = min(step + 1, phase.steps)
                self._reach(phase.start + phase.length * phase.done / phase.steps)
        return not self.cancelled

    def phase_finish(self, name: str) -> None:
        """End a phase, whether all its steps were told or not."""
        with self._lock:
            if phase := self._phases.pop(name, None):
                self._reach(phase.start + phase.length)

    def _reach(self, fraction: float) -> None:
        # Phases within one step share its span: the later ones begin behind what was reached.
        self.fraction = max(self.fraction, fraction)


def _instance(base: type, **methods: Any) -> Any:
    """Return an object of TensorRT's class `base`, which is not known before it is loaded."""
    return type(base.__name__, (base,), {k: staticmethod(v) for k, v in methods.items()})()
