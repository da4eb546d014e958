"""Commands in processes of their own, as a shell runs them."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from export_grok import __version__
from export_grok.artifacts import MANIFEST, open_bundle
from tests.commands.conftest import DEMO, Run

# From here on in processes of their own, as a shell runs them: stdout is buffered there.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
PROGRAM = [sys.executable, "-m", "export_grok"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["index", "{checkpoint}"],
        ["inspect", "{demo}"],
        ["generate", "{demo}", "--prompt", "a", "--prompt", "b", "--max-new-tokens", "2"],
        ["generate", "{demo}", "--prompt", "a", "--max-new-tokens", "2", "--json"],
    ],
    ids=["help", "index", "inspect", "generate", "json"],
)
def test_output_that_nobody_takes_is_no_traceback(
    arguments: list[str], demo: Path, checkpoint: Path
) -> None:
    filled = [word.format(demo=demo, checkpoint=checkpoint) for word in arguments]
    reader, writer = os.pipe()
    os.close(reader)
    for place, code in ((writer, 1), (os.open("/dev/full", os.O_WRONLY), 1)):
        run = subprocess.run(
            [*PROGRAM, *filled],
            stdout=place,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
        os.close(place)
        assert run.returncode == code, run.stderr
        expected = "" if place == writer else "Error: No space left on device\n"
        assert run.stderr == expected


def test_a_reader_that_takes_one_byte_is_enough(demo: Path) -> None:
    words = [*PROGRAM, "generate", str(demo), "--prompt", "a"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(
    done: Run, checkpoint: Path, tmp_path: Path, traced_once: None
) -> None:
    out = tmp_path / "bundle"
    words = ["build-engine", str(checkpoint), "--out", str(out)]
    with subprocess.Popen(
        [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        while not (out / "weights.json").exists() and process.poll() is None:
            time.sleep(0.02)
        # Python loses an interrupt that falls into a callback of its garbage collector, with a
        # complaint. Whoever pressed the keys presses them again.
        presses = 0
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            presses += 1
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        printed, told = process.communicate()
    # Python ends itself by the signal if the interrupt fell into code it had from a string; for a
    # shell that is 130 too.
    assert process.returncode in (130, -signal.SIGINT)
    assert printed == b""
    lines = told.decode().strip().splitlines()
    assert lines[-1].startswith("Aborted. ")
    assert len(lines) == 1 or presses > 1
    assert not (out / MANIFEST).exists()
    assert not list(out.glob("*.partial"))
    done(*words)
    assert open_bundle(out, kind="engine").config == DEMO


def test_the_installed_program_is_this_one() -> None:
    run = subprocess.run(
        [Path(sys.executable).parent / "export-grok", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"export-grok, version {__version__}\n"
