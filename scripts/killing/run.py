"""Break a command off at one moment after the other, and look at what it leaves behind."""

import gc
import os
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from export_grok.errors import ExportGrokError
from scripts.killing.moments import Happens, Moments
from scripts.killing.work import Content, Work

__all__ = ["Broken", "Trial"]

FAILED = 98


@dataclass
class Broken:
    """What came of breaking a command off.

    Attributes:
        outcomes: how often the folder was refused afterwards, or loaded and was right.
        faults: what was wrong, with the moment.
        seconds: that it took.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Trial:
    """A command, what it writes undisturbed, and a place for what it leaves broken off.

    Attributes:
        work: the command.
        moments: at which it changes files.
        room: at which it takes room on the disk.
        seconds: that it takes.
    """

    def __init__(self, work: Work, scratch: Path) -> None:
        self.work, self._scratch = work, scratch
        self._old = scratch / "old"
        self._old_loads: Content | None = None
        if work.before:
            work.begin(self._old)
            self._old_loads = work.loaded(self._old)
        self._run_here("warm")  # all is imported, and traced, before a process is split
        gc.collect()
        gc.freeze()  # what is here already is not looked at, and so not copied, by each process
        begun = time.monotonic()
        out = self._run_here("undisturbed")
        self.seconds = time.monotonic() - begun
        self._content, self._loads = work.content(out), work.loaded(out)
        self.moments = self._counted("killed")
        self.room = self._counted("full")

    def killed_at(self, number: int, broken: Broken) -> None:
        """Kill the command at a moment, look, and run it again."""
        out = self._begun(f"killed_{number}")
        status = self._forked(lambda: Moments(out, "killed", number), out)
        if status != -signal.SIGKILL:
            broken.faults.append(f"moment {number}: the command ended with {status}")
        self._look(out, f"killed at moment {number}", broken)

    def killed_after(self, seconds: float, broken: Broken) -> None:
        """Kill the command after so long, look, and run it again."""
        out = self._begun("timed")
        child = self._fork(lambda: None, out)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self._look(out, f"killed after {seconds:.4f} s", broken)

    def killed_again_and_again(self, random: Random, broken: Broken) -> None:
        """Kill the command, and whoever goes on with it, until one is done."""
        out = self._begun("again")
        numbers: list[int] = []
        while len(numbers) < 20:
            numbers.append(random.randrange(self.moments))
            number = numbers[-1]
            if self._forked(lambda n=number: Moments(out, "killed", n), out) == 0:  # type: ignore[misc]
                break
            self._hold(out, f"killed at moments {numbers}", broken)
        self._look(out, f"killed at moments {numbers}", broken)

    def full_at(self, number: int, broken: Broken) -> None:
        """Have no room on the disk at a moment; it must be said in one line."""
        out, said = self._begun(f"full_{number}"), self._scratch / "said"
        status = self._forked(lambda: Moments(out, "full", number), out, said)
        text = said.read_text()
        told = status == 1 and text.startswith("Error: ") and text.count("\n") == 1
        if status and not told:
            broken.faults.append(f"no room at moment {number}: exit code {status}: {text}")
        self._look(out, f"no room at moment {number}", broken)

    def _look(self, out: Path, when: str, broken: Broken) -> None:
        self._hold(out, when, broken)
        status = self._forked(lambda: None, out, self._scratch / "said")
        if status:
            said = (self._scratch / "said").read_text()
            broken.faults.append(f"{when}: run again it ends with {status}: {said}")
        elif (content := self.work.content(out)) != self._content:
            other = sorted(
                name
                for name in content.keys() | self._content.keys()
                if content.get(name) != self._content.get(name)
            )
            broken.faults.append(f"{when}: run again it leaves other files: {', '.join(other)}")
        shutil.rmtree(out)

    def _hold(self, out: Path, when: str, broken: Broken) -> None:
        """See that a folder does not load, or is right."""
        try:
            loads = self.work.loaded(out)
        except ExportGrokError:
            broken.outcomes["refused"] += 1
            return
        except Exception as error:
            broken.faults.append(f"{when}: {type(error).__name__}: {error}")
            return
        if loads == self._loads:
            broken.outcomes["whole"] += 1
        elif loads == self._old_loads:
            broken.outcomes["as before"] += 1
        elif loads == self.work.first_of(self._loads):
            broken.outcomes["whole graphs"] += 1
        else:
            broken.faults.append(f"{when}: it loads, and is wrong: {sorted(loads)}")

    def _begun(self, name: str) -> Path:
        out = self._scratch / name
        if self.work.before:
            shutil.copytree(self._old, out, symlinks=True)
        else:
            self.work.begin(out)
        return out

    def _run_here(self, name: str) -> Path:
        out = self._begun(name)
        said = self._scratch / "said"
        if status := self.work.run(out, said):
            raise RuntimeError(f"{self.work.name} ends with {status}: {said.read_text()}")
        return out

    def _counted(self, happens: Happens) -> int:
        """Return at how many moments something could happen."""
        count = self._scratch / "count"
        out = self._begun("counted")
        child = os.fork()
        if not child:
            moments = Moments(out, happens)
            self.work.run(out)
            counted = moments.count
            count.write_text(str(counted))
            os._exit(0)
        os.waitpid(child, 0)
        shutil.rmtree(out)
        return int(count.read_text())

    def _forked(self, begin: Callable[[], object], out: Path, said: Path | None = None) -> int:
        """Return how a process ended that ran the command."""
        _, status = os.waitpid(self._fork(begin, out, said), 0)
        return os.waitstatus_to_exitcode(status)

    def _fork(self, begin: Callable[[], object], out: Path, said: Path | None = None) -> int:
        child = os.fork()
        if child:
            return child
        code = FAILED
        try:
            begin()
            code = self.work.run(out, said)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
