"""A command that takes long or much says what it needs first, and begins only if that is there."""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from export_grok import machine
from export_grok.artifacts import open_bundle
from export_grok.cli import cli
from tests.commands.conftest import Refused, Run

# They read headers and a manifest.
READERS = {"inspect", "doctor"}
FIGURE = r"[\d.]+ [MG]B"


@dataclass(frozen=True)
class Places:
    """What commands are run on."""

    demo: Path
    checkpoint: Path
    tokens: Path
    out: Path


Arguments = Callable[[Places], list[object]]

QUICK = ("--prompt", 3, "--tokens", 1, "--layers", 0, "--threads", 1)

# What writes, and what only computes.
WRITERS: dict[str, Arguments] = {
    "index": lambda at: [at.checkpoint, "--out", at.out],
    "export": lambda at: [at.checkpoint, "--out", at.out, "--weights", "copy"],
    "build-engine": lambda at: [at.checkpoint, "--out", at.out, "--tp", 2],
    "logits": lambda at: [at.demo, "--tokens", at.tokens, "--out", at.out],
    "plant-fault": lambda at: [at.demo, "exact_gelu", "--out", at.out],
    "demo-checkpoint": lambda at: [at.out],
    "package": lambda at: [at.demo, "--triton", at.out],
}
COMPUTERS: dict[str, Arguments] = {
    "generate": lambda at: [at.demo, "--prompt", "The", "--max-new-tokens", 2],
    "evaluate": lambda at: [at.demo, "--text", at.tokens.with_suffix(".txt"), "--window", 8],
    "verify": lambda at: [at.demo, *QUICK],
    "bench": lambda at: [at.demo, "--rounds", 1, "--prompt-tokens", 4, "--context", 4],
    "quantise-report": lambda at: [at.checkpoint],
}
COMMANDS = WRITERS | COMPUTERS
# Of other tests: what they write is theirs.
ELSEWHERE = {"import", "check", "export-weights", "chat", "c-library"}


@pytest.fixture
def at(demo: Path, checkpoint: Path, tokens: Path, tmp_path: Path) -> Places:
    """Return the demo, some input, and a place to write to."""
    tokens.with_suffix(".txt").write_text("In the beginning was the word. " * 8)
    (tmp_path / "new").mkdir()
    return Places(demo=demo, checkpoint=checkpoint, tokens=tokens, out=tmp_path / "new" / "out")


@pytest.fixture
def no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a system with 3 MB of memory left."""
    root = tmp_path / "system"
    (root / "proc").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemAvailable:    3000 kB\n")
    monkeypatch.setattr(machine, "ROOT", root)


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a full disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))


def listing(folder: Path) -> dict[str, int]:
    """Return all paths below a folder, and when each was changed."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_every_command_but_those_that_only_look_can_be_tried_and_forced() -> None:
    for name, command in cli.commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert ({"--dry-run", "--force"} <= options) == (name not in READERS), name
    assert {*COMMANDS, *ELSEWHERE, *READERS} == set(cli.commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dry_run_says_what_is_needed_and_leaves_nothing(
    command: str, at: Places, done: Run, tmp_path: Path
) -> None:
    before = listing(tmp_path) | listing(at.demo) | listing(at.checkpoint)
    said = done(command, *COMMANDS[command](at), "--dry-run")
    needs, writes, *_ = said.out.splitlines()
    assert re.fullmatch(rf"needs .*{FIGURE} of .*, (less than a second|about \d+ s)", needs)
    assert writes.startswith("writes ")
    assert (writes == "writes nothing") == (command in COMPUTERS)
    assert (str(at.out) in writes) == (command in WRITERS)
    assert said.err == ""
    assert listing(tmp_path) | listing(at.demo) | listing(at.checkpoint) == before


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.usefixtures("no_disk")
def test_a_full_disk_is_told_with_both_figures_before_anything_is_written(
    command: str, at: Places, refused: Refused
) -> None:
    text = refused(command, *COMMANDS[command](at))
    assert "--force" in text
    assert re.search(rf"{at.out.parent}\S* has 0 MB of free disk; {FIGURE} are needed", text)
    assert list(at.out.parent.iterdir()) == []


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"index", "demo-checkpoint", "package"}))
@pytest.mark.usefixtures("no_memory")
def test_too_little_memory_is_told_with_both_figures_before_anything_is_done(
    command: str, at: Places, refused: Refused
) -> None:
    text = refused(command, *COMMANDS[command](at))
    assert re.search(rf"\n  3 MB of memory are available; {FIGURE} are needed", text)
    assert list(at.out.parent.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("no_memory", "no_disk", "traced_once")
def test_force_goes_on_and_of_little_nothing_is_said(command: str, at: Places, done: Run) -> None:
    outcome = done(command, *COMMANDS[command](at), "--force")
    assert outcome.out
    assert "needs" not in outcome.err
    assert at.out.exists() == (command in WRITERS)


@pytest.mark.usefixtures("no_memory", "no_disk")
def test_a_dry_run_refuses_what_the_run_would_and_a_forced_one_only_says(
    at: Places, run: Run
) -> None:
    arguments = ("export", at.checkpoint, "--out", at.out, "--weights", "copy", "--dry-run")
    refusal = run(*arguments)
    assert refusal.code == 2
    assert refusal.out.startswith("needs ")
    assert len(refusal.err.splitlines()) == 3  # disk and memory
    forced = run(*arguments, "--force")
    assert (forced.code, forced.out, forced.err) == (0, refusal.out, "")
    assert not at.out.exists()


@pytest.mark.usefixtures("traced_once")
def test_what_is_there_needs_nothing_and_is_not_refused_for_a_full_disk(
    at: Places, done: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = ("export", at.checkpoint, "--out", at.out, "--weights", "copy")
    engine = ("build-engine", at.checkpoint, "--out", at.out, "--weights", "copy")
    for arguments in (graphs, engine, (*engine, "--tp", 2)):
        made = done(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
            assert done(*arguments) == made
            tried = done(*arguments, "--dry-run")
        assert tried.out == "needs nothing\nwrites nothing: all is there\n"
        assert open_bundle(at.out)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "DEMO", "--prompt", "The " * 500], "shorten the prompt"),
        (["generate", "DEMO", "--prompt", "a", "--tp", 2], "needs 1 rank, sees --tp 2"),
        (["logits", "DEMO", "--tokens", "FAR", "--out", "OUT"], "this model knows 0 to 1023"),
        (
            ["logits", "DEMO", "--tokens", "TOKENS", "--out", "OUT", "--decode", 9],
            "9 tokens cannot be decoded singly of 5",
        ),
        (["build-engine", "DEMO", "--tp", 3], "use 1, 2"),
        (["export", "CHECKPOINT", "--out", "FULL"], "is not empty and holds no bundle"),
        (["demo-checkpoint", "FULL"], "is not empty"),
        (["plant-fault", "DEMO", "exact_gelu", "--out", "FULL"], "is not empty"),
    ],
)
def test_a_dry_run_finds_what_is_wrong(
    command: list[object], said: str, at: Places, refused: Refused, tmp_path: Path, run: Run
) -> None:
    np.save(tmp_path / "far.npy", np.full((1, 2), 1024))
    places = {
        "DEMO": at.demo,
        "CHECKPOINT": at.checkpoint,
        "TOKENS": at.tokens,
        "FAR": tmp_path / "far.npy",
        "OUT": at.out,
        "FULL": tmp_path,
    }
    arguments = [places.get(str(argument), argument) for argument in command]
    outcome = run(*arguments, "--dry-run")
    assert outcome.code in (1, 2)
    assert said in outcome.err
    assert outcome.out == ""


def test_much_is_said_before_it_begins(
    at: Places, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export_grok.needs.MUCH_BYTES", 10**6)
    outcome = run("generate", at.demo, "--prompt", "a", "--max-new-tokens", 1)
    assert outcome.code == 0
    assert outcome.err.splitlines()[0].startswith("needs ")
    assert "needs" not in outcome.out


@pytest.mark.skipif(sys.platform != "linux", reason="needs ulimit -v")
def test_a_process_with_too_small_a_limit_ends_with_both_figures_and_does_not_vanish(
    at: Places,
) -> None:
    limit = 300_000_000
    command = [sys.executable, "-m", "export_grok", "generate", str(at.demo), "--prompt", "a"]
    ended = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # else each core takes some of it
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    last = ended.stderr.splitlines()[-1]
    assert re.search(rf"{FIGURE} of address space are allowed; {FIGURE} are needed", last)
