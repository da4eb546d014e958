"""Run a step in a process of its own: after a fault on a GPU a process can use it no more.

    python -m scripts.gpu.child KEY OPTIONS FILE

OPTIONS is JSON, FILE gets the outcome as JSON.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.step import Options, Outcome, Step, outcome_of
from scripts.gpu.steps import step_of

__all__ = ["in_child", "outcome_from"]

ROOT = Path(__file__).resolve().parents[2]


def in_child(step: Step, options: Options, *, timeout: float) -> Outcome:
    """Return what comes of a step; a crash and a hang are failures of it.

    Args:
        step: to run.
        options: for it.
        timeout: in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcome.json")
        given = json.dumps(dataclasses.asdict(options))
        command = [sys.executable, "-m", "scripts.gpu.child", step.key, given, str(file)]
        return outcome_from(command, file, timeout=timeout)


def outcome_from(command: Sequence[str], file: Path, *, timeout: float) -> Outcome:
    """Run a command that writes an outcome; what it prints goes where ours does."""
    # A group of its own: a step may have started processes that would hang on.
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return Outcome(status="fail", text=f"not done after {timeout:g} s: it was ended")
    finally:
        _end(process)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return Outcome(status="fail", text=f"the process was ended by {name}")
    if process.returncode or not file.exists():
        return Outcome(status="fail", text=f"the process ended with {process.returncode}")
    return Outcome(**json.loads(file.read_text()))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and those it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(key: str, options: str, file: str) -> None:
    """Run one step."""
    outcome = outcome_of(step_of(key), Options(**json.loads(options)))
    Path(file).write_text(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    main(*sys.argv[1:])
