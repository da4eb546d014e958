"""What kills commands finds those that leave something wrong: planted ones, with one mistake."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from export_grok.errors import BundleError
from export_grok.files import atomic_file, output_errors
from scripts.killing.run import Broken, Trial
from scripts.killing.work import Content, Work, content_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork and SIGKILL"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

WHOLE = {"a": b"a" * 100, "b": b"b" * 100, "done": b""}


@dataclass(frozen=True, kw_only=True)
class Toy(Work):
    """Writes three files; with the one called done they count."""

    write: Callable[[Path], None]

    def run(self, out: Path, said: Path | None = None) -> int:
        try:
            with output_errors(out):
                out.mkdir(exist_ok=True)
                self.write(out)
        except Exception as error:
            if said:
                said.write_text(f"Error: {error}\n")
            return 1
        return 0

    def loaded(self, folder: Path) -> Content:
        if not (folder / "done").exists():
            raise BundleError("it is not done")
        return content_of(folder)


def right(out: Path) -> None:
    for name, content in WHOLE.items():
        if not (out / name).exists():
            with atomic_file(out / name) as file:
                file.write(content)


def done_first(out: Path) -> None:
    for name in ("done", "a", "b"):
        with atomic_file(out / name) as file:
            file.write(WHOLE[name])


def not_atomic(out: Path) -> None:
    for name, content in WHOLE.items():
        if not (out / name).exists():
            file = os.open(out / name, os.O_WRONLY | os.O_CREAT)
            os.pwrite(file, content, 0)
            os.close(file)


def full_is_well(out: Path) -> None:
    for name, content in WHOLE.items():
        try:
            with atomic_file(out / name) as file:
                file.write(content)
        except Exception:
            continue


def never_again(out: Path) -> None:
    if (out / "a").exists():
        raise BundleError("a is there")
    right(out)


def two_lines(out: Path) -> None:
    try:
        right(out)
    except Exception as error:
        raise BundleError(f"first\nsecond: {error}") from error


def broken_by(write: Callable[[Path], None], scratch: Path) -> Broken:
    """Break a command off at every moment, in every way."""
    trial = Trial(Toy(name="toy", command=(), write=write), scratch)
    broken = Broken()
    for number in range(trial.moments):
        trial.killed_at(number, broken)
    for number in range(trial.room):
        trial.full_at(number, broken)
    trial.killed_after(0.0, broken)
    trial.killed_again_and_again(Random(1), broken)
    assert min(trial.moments, trial.room) > 5
    return broken


def test_a_command_that_is_right_has_no_faults(tmp_path: Path) -> None:
    broken = broken_by(right, tmp_path)
    assert broken.faults == []
    assert broken.outcomes["refused"] > 5
    assert broken.outcomes["whole"] > 0


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (done_first, "it loads, and is wrong"),
        (not_atomic, "run again it leaves other files: a"),
        (full_is_well, "it loads, and is wrong"),
        (never_again, "run again it ends with 1: Error: a is there"),
        (two_lines, "exit code 1: Error: first"),
    ],
)
def test_a_command_that_makes_a_mistake_is_found(
    write: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    broken = broken_by(write, tmp_path)
    assert any(said in fault for fault in broken.faults)
    assert all("moment" in fault or "killed after" in fault for fault in broken.faults)
