"""A rank's process as its parent sees it: started, heard, and ended for certain."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading

from export_grok.runtime.ranks.channel import channel_pair

__all__ = ["PROGRAM", "Worker"]

logger = logging.getLogger(__name__)

PROGRAM = "export_grok.runtime.ranks.process"
KEPT = 4096
# Seconds that a process has to be gone after its socket closed, or after it was killed.
GRACE = 1.0


class Worker:
    """A process that was started, and what it last did.

    Attributes:
        rank: its number.
        pid: of the process.
        channel: to talk with it.
        output: descriptor of what it prints; read it by `listen`.
        last: what it last did, in words.
    """

    def __init__(self, rank: int, memory_file: int) -> None:
        self.rank = rank
        self.last = "was started"
        self.channel, theirs = channel_pair()
        # A thread's end counts as the parent's: only the first thread's does not come too early.
        lasting = threading.current_thread() is threading.main_thread()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    *("-m", PROGRAM),
                    *map(str, (theirs.fileno(), memory_file, os.getpid() if lasting else 0)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), memory_file),
                start_new_session=True,  # Ctrl-C is the parent's: it ends the ranks
                bufsize=0,
                # Modules are found where this process finds them.
                env=os.environ | {"PYTHONPATH": _module_path()},
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self._tail = b""

    def listen(self) -> bool:
        """Take in what it printed; return whether there may be more later."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, 1 << 16):
                self._tail = (self._tail + data)[-KEPT:]
                logger.debug("rank %d: %s", self.rank, data.decode(errors="replace").rstrip())
            return False
        return True

    def last_words(self) -> str:
        """Return the last lines that it printed, as one."""
        self.listen()
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines()]
        return " / ".join([line for line in lines if line][-3:])

    def forget_words(self) -> None:
        """Forget what it printed until now."""
        self.listen()
        self._tail = b""

    def ending(self) -> str:
        """Return how it ended, in words, after its socket was closed."""
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return "closed its connection and ran on"
        if code >= 0:
            return f"left with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def kill(self) -> None:
        """Kill it; `reap` waits for that."""
        self._process.kill()

    def reap(self) -> None:
        """Wait until it is gone, and let go of what belongs to it."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # nothing ends one in a disk's hands
            self._process.wait(GRACE)
        self.channel.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _module_path() -> str:
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
