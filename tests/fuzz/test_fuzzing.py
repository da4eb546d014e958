"""The fuzzer finds readers that do what none may: planted ones, each with one mistake."""

import faulthandler
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from export_grok.errors import CheckpointError
from scripts.fuzzing import run
from scripts.fuzzing.edits import edited_bytes, edited_json
from scripts.fuzzing.files import Files, Odd, Placed
from scripts.fuzzing.keep import keep, kept_files
from scripts.fuzzing.line_edits import edited_lines
from scripts.fuzzing.run import Findings, fuzzed
from scripts.fuzzing.target import Case, Target
from scripts.fuzzing.tripwire import Tripwire

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs fork, inotify and /proc"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


class Toy(Target):
    """A file of three letters, each of which an edit may change; only an x matters."""

    name = "toy"

    def __init__(self, folder: Path, reader: Callable[[bytes], Any]) -> None:
        self.placed = Placed(folder / "toy", {"letters": b"abc"})
        self.reader = reader

    def edit(self, files: Files, random: Random) -> None:
        letters = files["letters"]
        assert isinstance(letters, bytes)
        at = random.randrange(3)
        files["letters"] = letters[:at] + random.choice((b"x", b"y")) + letters[at + 1 :]

    def read(self) -> Any:
        letters = (self.folder / "letters").read_bytes()
        if b"x" in letters:
            return self.reader(letters)
        if b"y" in letters:
            raise CheckpointError(f"{self.folder}: there is a y")
        return letters

    def hold(self, said: Any) -> None:
        assert said == (self.folder / "letters").read_bytes()


@pytest.fixture
def findings_of(tmp_path: Path) -> Callable[[Callable[[bytes], Any]], Findings]:
    """Return what fuzzes a reader, and holds the findings to the x."""

    def findings(reader: Callable[[bytes], Any]) -> Findings:
        toy = Toy(tmp_path, reader)
        found = fuzzed(toy, 1, inputs=30)
        for finding in found.found:
            assert toy.files_of(finding.case)["letters"].count(b"x") == 1  # type: ignore[union-attr]
            assert len(finding.case.edits) == 1  # without the edits that it does not need
        assert (tmp_path / "toy" / "letters").read_bytes() == b"abc"
        return found

    return findings


FindingsOf = Callable[[Callable[[bytes], Any]], Findings]


def test_a_reader_that_is_right_has_no_findings(findings_of: FindingsOf) -> None:
    found = findings_of(lambda letters: letters)
    assert (found.inputs, found.found) == (31, [])
    assert found.outcomes["CheckpointError"] > 5 < found.outcomes["read"]


def no_key(letters: bytes) -> Any:
    return {b"a": 1}[letters]


def crash(_letters: bytes) -> Any:
    faulthandler.disable()  # no need to tell where
    os.abort()


def no_name(letters: bytes) -> Any:
    raise CheckpointError("something is wrong")


def recursion(letters: bytes) -> Any:
    return recursion(letters)


def swallowed(_letters: bytes) -> Any:
    try:
        return Path("/etc/hostname").read_bytes()
    except Exception:
        return None


MISTAKES: dict[str, tuple[Callable[[bytes], Any], str]] = {
    "another error": (no_key, "KeyError: b'"),
    "an error that names nothing": (no_name, "AssertionError: this names no file: something"),
    "no end": (recursion, "RecursionError: "),
    "a wrong answer": (lambda letters: b"abc", "AssertionError: "),
    "a command": (lambda letters: os.system("exit 1"), "os.system (b'exit 1',)"),
    "a process": (
        lambda letters: subprocess.run(["true"], check=False),
        "subprocess.Popen ('true'",
    ),
    "an import": (lambda letters: __import__("this"), "import ('this'"),
    "code": (lambda letters: exec("letters"), "exec (<code object"),
    "a file elsewhere": (swallowed, "opens /etc/hostname"),
    "a file written elsewhere": (
        lambda letters: Path(sys.prefix, "nothing").write_text(""),
        f"writes {Path(sys.prefix).resolve()}/nothing",
    ),
    "a file removed elsewhere": (lambda letters: Path("/nowhere").unlink(), "writes /nowhere"),
    "much memory": (lambda letters: mmap.mmap(-1, 100 << 20) and letters, "MiB were taken"),
    "all memory": (lambda letters: bytearray(1 << 62), "MemoryError: "),
    "a crash": (crash, "died of SIGABRT"),
    "an end": (lambda letters: os._exit(0), "ended with the inputs not done"),
    "another end": (lambda letters: sys.exit(0), "SystemExit: 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_reader_that_makes_a_mistake_is_found(mistake: str, findings_of: FindingsOf) -> None:
    reader, said = MISTAKES[mistake]
    found = findings_of(reader)
    assert len(found.found) == 1
    assert said in found.found[0].what
    # A process is seen to take the most once only.
    assert found.repeated > 2 or mistake == "much memory"


def test_a_reader_that_hangs_is_found(
    findings_of: FindingsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MOST_SECONDS", 0.1)
    found = findings_of(lambda letters: time.sleep(100))
    assert [finding.what for finding in found.found] == [run.HUNG]


def test_a_tripwire_tells_who_opens_its_file_or_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    tripwire = Tripwire(tmp_path / "file")
    (tmp_path / "file").exists()
    assert not tripwire.touched()
    (tmp_path / "link").read_bytes()
    assert tripwire.touched()
    assert not tripwire.touched()


def test_a_finding_is_kept_and_given_again(tmp_path: Path) -> None:
    toy = Toy(tmp_path, no_key)
    (finding,) = fuzzed(toy, 1, inputs=60).found
    place = keep(toy, finding, 1, tmp_path / "findings")
    assert place.name == f"toy-1-{finding.case.number}"
    assert kept_files(place, toy.placed.whole) == toy.files_of(finding.case)


def test_the_same_seed_gives_the_same_inputs() -> None:
    assert Case.of(1, 7) == Case.of(1, 7) != Case.of(2, 7)
    for edit in (edited_bytes, edited_json, edited_lines):
        content = b'{"a": [1, 2, {"b": "c"}], "d": null}'
        made = [edit(content, Random(seed)) for seed in range(300)]
        assert made == [edit(content, Random(seed)) for seed in range(300)]
        assert len(set(made)) > 100


def test_what_was_in_the_place_of_a_file_goes_with_it(tmp_path: Path) -> None:
    whole: Files = {"a/b": b"1", "c": b"2"}
    placed = Placed(tmp_path / "files", whole)
    for odd in (Odd("pipe"), Odd("folder"), Odd("link", "c"), Odd("link", ".."), b"3"):
        placed.place({"a/b": odd, "d": b"4"})
        assert (tmp_path / "files" / "d").exists()
        assert not (tmp_path / "files" / "c").exists()
        placed.place(whole)
        found = {
            path.name: path.read_bytes() for path in placed.folder.rglob("*") if path.is_file()
        }
        assert found == {"b": b"1", "c": b"2"}
