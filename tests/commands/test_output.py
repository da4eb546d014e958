"""A place that cannot be written is told in one line, and is left as it was."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from export_grok.artifacts import open_bundle
from tests.bundles import hashes
from tests.commands.conftest import Refused, Run


def commands_that_write(checkpoint: Path, bundle: Path, tokens: Path) -> dict[str, list[object]]:
    """Return each command that writes, but for the last argument: where to."""
    return {
        "index": ["index", checkpoint, "--out"],
        "export": ["export", checkpoint, "--out"],
        "export copy": ["export", checkpoint, "--weights", "copy", "--out"],
        "build-engine": ["build-engine", checkpoint, "--out"],
        "logits": ["logits", bundle, "--tokens", tokens, "--out"],
        "demo-checkpoint": ["demo-checkpoint"],
    }


WRITING = list(commands_that_write(Path(), Path(), Path()))


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("command", WRITING)
def test_a_place_that_cannot_be_written_is_told(
    command: str, refused: Refused, checkpoint: Path, demo: Path, tokens: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    arguments = commands_that_write(checkpoint, demo, tokens)[command]
    text = refused(*arguments, tmp_path / "file" / "out", code=1)
    assert text.startswith(f"cannot write {tmp_path / 'file' / 'out'}: Not a directory")
    assert "\n" not in text


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    ("command", "written"),
    [
        (command, written)
        for command in WRITING
        for written in ((0,) if command in ("index", "logits") else (0, 1, 7))
    ],
)
def test_a_full_disk_is_told_in_one_line_and_nothing_is_left(
    command: str,
    written: int,
    refused: Refused,
    checkpoint: Path,
    demo: Path,
    tokens: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = commands_that_write(checkpoint, demo, tokens)[command]
    real, left = os.fsync, [2 * written]  # a file and its folder

    def fsync(descriptor: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    text = refused(*arguments, out, code=1)
    assert text.startswith(f"cannot write {out}")
    assert text.endswith("No space left on device; free some space or choose another --out")
    assert "\n" not in text


@pytest.mark.parametrize("command", ["export", "build-engine", "demo-checkpoint"])
def test_a_folder_that_holds_something_else_is_left_alone(
    command: str, refused: Refused, checkpoint: Path, demo: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_bytes(b"precious")
    arguments = commands_that_write(checkpoint, demo, tmp_path)[command]
    text = refused(*arguments, tmp_path / "mine", code=1 if "demo" in command else 2)
    assert f"{tmp_path / 'mine'} is not empty" in text
    assert hashes(tmp_path).keys() == {"mine/file"}


@pytest.mark.usefixtures("traced_once")
def test_a_bundle_of_other_options_is_replaced_only_when_told_to(
    done: Run, refused: Refused, demo: Path, checkpoint: Path, tmp_path: Path
) -> None:
    bundle = shutil.copytree(demo, tmp_path / "bundle")
    before = hashes(bundle)
    arguments = ("build-engine", checkpoint, "--out", bundle, "--weights", "copy")
    text = refused(*arguments)
    assert "replace it with --overwrite, or choose another --out" in text
    assert hashes(bundle) == before
    done(*arguments, "--overwrite")
    assert open_bundle(bundle, kind="engine").weights_root == bundle


def test_debug_shows_the_traceback_too(run: Run, tmp_path: Path) -> None:
    outcome = run("--debug", "index", tmp_path / "none")
    assert outcome.code == 2
    assert outcome.err.startswith("Traceback (most recent call last):")
    assert "FileNotFoundError" in outcome.err
    assert outcome.err.splitlines()[-1].startswith(f"Error: {tmp_path / 'none'} cannot be read")


def test_what_the_system_refuses_unforeseen_is_one_line(
    run: Run, refused: Refused, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "some/file")

    monkeypatch.setattr("export_grok.export.checkpoint.open_weights", broken)
    assert refused("index", tiny, code=1) == "some/file: Input/output error"
    outcome = run("--debug", "index", tiny)
    assert (outcome.code, "Traceback" in outcome.err) == (1, True)
