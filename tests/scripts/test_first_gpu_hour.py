"""The program around the steps: what it prints, writes and returns, whatever they do."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from export_grok.engines.trt.module import Gpu
from export_grok.errors import BuildError
from scripts import first_gpu_hour
from scripts.gpu.child import in_child, outcome_from
from scripts.gpu.report import NOT_RUN, section, summary
from scripts.gpu.step import Options, Outcome, Skipped, Step, outcome_of
from scripts.gpu.steps import STEPS, step_of
from tests.conftest import cuda_devices

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options(folder="")
KEYS = tuple(step.key for step in STEPS)

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return the program on a machine that has a GPU; each step does what is told for its key."""
    monkeypatch.setattr(first_gpu_hour, "first_gpu", lambda: Gpu(name="Card", sm=90))

    def program(*arguments: str, **told: Outcome) -> Result:
        def one(step: Step, _options: Options, *, timeout: float) -> Outcome:
            return told.get(f"step_{step.key}", Outcome(status="pass", text="all is well"))

        monkeypatch.setattr(first_gpu_hour, "in_child", one)
        return CliRunner().invoke(first_gpu_hour.main, arguments, catch_exceptions=False)

    return program


def test_all_steps_run_in_their_order(run: Run) -> None:
    found = run()
    assert found.exit_code == 0
    begun = [line for line in found.stdout.splitlines() if line.startswith("step ")]
    assert begun == [f"step {step.key}: {step.title}" for step in STEPS]
    assert f"{len(STEPS)} passed" in found.stdout


def test_a_step_that_fails_stops_no_other_and_is_the_exit_code(run: Run) -> None:
    found = run(step_a=Outcome(status="fail", text="column 3 is wrong"))
    assert found.exit_code == 1
    assert "FAIL    a  column 3 is wrong" in found.stdout
    assert found.stdout.count("all is well") == len(STEPS) - 1
    assert found.stdout.splitlines()[-1] == (
        f"{len(STEPS) - 1} passed ({' '.join(key for key in KEYS if key != 'a')}), 1 failed (a)"
    )


def test_a_skipped_step_is_no_failure(run: Run) -> None:
    found = run(step_6=Outcome(status="skip", text="one GPU"))
    assert found.exit_code == 0
    assert "skipped 6  one GPU" in found.stdout
    assert "1 skipped (6)" in found.stdout


def test_some_steps_may_be_chosen(run: Run) -> None:
    found = run("--steps", "5,a")
    begun = [line for line in found.stdout.splitlines() if line.startswith("step ")]
    assert [line[5] for line in begun] == ["a", "5"]


def test_a_step_that_is_not_known_is_told(run: Run) -> None:
    found = run("--steps", "a,9")
    assert found.exit_code == 2
    assert "there is no step 9; use 0,a,b,1" in found.stderr


@pytest.mark.parametrize("option", ["--rounds", "--columns", "--samples"])
def test_a_check_of_nothing_is_refused(run: Run, option: str) -> None:
    found = run(option, "0")
    assert found.exit_code == 2
    assert option in found.stderr


def test_all_figures_are_in_the_json(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    figures = {"read": 4.1, "errors": [float("inf"), 0.5]}
    fast = Outcome(status="pass", text="fast", figures=figures)
    run("--json", str(file), step_b=fast, step_1=Outcome(status="fail", text="no plan"))
    found = json.loads(file.read_text())
    assert list(found["steps"]) == list(KEYS)
    assert found["steps"]["b"]["figures"] == {"read": 4.1, "errors": [None, 0.5]}
    assert found["steps"]["1"]["status"] == "fail"


def test_the_report_keeps_what_else_the_file_says(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "gpu.md"
    file.write_text("# On a GPU\n\nby hand\n")
    run("--report", str(file), step_b=Outcome(status="pass", text="4 | 5", table="| a |"))
    run("--steps", "a", "--report", str(file))
    text = file.read_text()
    assert text.startswith("# On a GPU\n\nby hand\n")
    assert text.count("## Results") == 1
    assert text.count(NOT_RUN) == len(STEPS) - 1


def test_a_file_that_cannot_be_written_is_told_in_a_line(run: Run, tmp_path: Path) -> None:
    found = run("--steps", "0", "--json", str(tmp_path / "no" / "such" / "file"))
    assert found.exit_code == 1
    assert found.stderr.startswith("Error: ")
    assert found.stderr.count("\n") == 1


def test_cells_of_the_report_do_not_break_its_table() -> None:
    text = section({"a": Outcome(status="fail", text="a | b\nc")})
    (row,) = [line for line in text.splitlines() if line.startswith("| a |")]
    assert "a \\| b c" in row


def test_the_document_shows_the_results_of_a_run_or_none() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    if NOT_RUN in text:
        assert section({}) in text
    for step in STEPS:
        assert step.title in text


# ---- without a driver


def test_without_a_driver_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Gpu:
        raise BuildError("there is no NVIDIA driver here (libcuda.so.1: no such file)")

    monkeypatch.setattr(first_gpu_hour, "first_gpu", none)
    found = CliRunner().invoke(first_gpu_hour.main, [])
    assert found.exit_code == 1
    assert found.stdout == ""
    assert found.stderr == "Error: there is no NVIDIA driver here (libcuda.so.1: no such file)\n"


@pytest.mark.skipif(cuda_devices() > 0, reason="there is a GPU")
@pytest.mark.parametrize("program", ["scripts.first_gpu_hour", "benchmarks.gpu_kernels"])
def test_the_programs_end_here_with_one_clear_line(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


# ---- what a step may do


def test_every_step_is_where_it_is_said_to_be() -> None:
    assert len(set(KEYS)) == len(KEYS)
    for step in STEPS:
        module, name = step.function.split(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed"
)
@pytest.mark.parametrize("step", STEPS[3:], ids=KEYS[3:])
def test_without_tensorrt_a_step_is_skipped(step: Step) -> None:
    found = outcome_of(step, OPTIONS)
    assert found.status == "skip"
    assert found.text.startswith("tensorrt is not installed")


def failing(_options: Options) -> Outcome:
    raise BuildError("TensorRT refuses it")


def breaking(_options: Options) -> Outcome:
    return Outcome(status="pass", text={"something": ""}["nothing"])


def skipping(_options: Options) -> Outcome:
    raise Skipped("one GPU")


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("failing", "fail", "TensorRT refuses it"),
        ("breaking", "fail", "KeyError: 'nothing'"),
        ("skipping", "skip", "one GPU"),
    ],
)
def test_what_a_step_raises_is_its_outcome(name: str, status: str, text: str) -> None:
    found = outcome_of(Step(key="x", title="", function=f"{__name__}:{name}"), OPTIONS)
    assert (found.status, found.text) == (status, text)
    assert ("traceback" in found.figures) == (name == "breaking")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_process_that_crashes_is_a_failure(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    found = outcome_from(python(code), tmp_path / "none", timeout=60)
    assert (found.status, found.text) == ("fail", "the process was ended by SIGSEGV")


def test_a_process_that_writes_nothing_is_a_failure(tmp_path: Path) -> None:
    for code in (0, 3):
        found = outcome_from(python(f"raise SystemExit({code})"), tmp_path / "none", timeout=60)
        assert (found.status, found.text) == ("fail", f"the process ended with {code}")


def test_a_process_that_hangs_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    file = tmp_path / "started"
    code = (
        "import pathlib, subprocess, time\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(other.pid))\n"
        "time.sleep(600)"
    )
    found = outcome_from(python(code), tmp_path / "none", timeout=3)
    assert (found.status, found.text) == ("fail", "not done after 3 s: it was ended")
    for _ in range(100):  # whoever takes over orphans may take a moment
        if not _runs(int(file.read_text())):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the process that it started still runs")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


@pytest.mark.skipif(cuda_devices() > 0, reason="there is a GPU")
def test_a_step_comes_back_from_a_process_of_its_own() -> None:
    found = in_child(STEPS[0], OPTIONS, timeout=60)
    assert found.status == "fail"
    assert "CUDA" in found.text or "driver" in found.text
    assert found.seconds > 0


def test_the_summary_counts_each_kind_once() -> None:
    kinds = {"0": "pass", "a": "fail", "b": "pass", "1": "skip"}
    found = {key: Outcome(status=kind, text="") for key, kind in kinds.items()}  # type: ignore[arg-type]
    assert summary(found) == "2 passed (0 b), 1 failed (a), 1 skipped (1)"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_on_a_gpu_no_step_fails(key: str, tmp_path: Path) -> None:
    options = Options(full=False, rounds=1, samples=3, folder=str(tmp_path))
    found = in_child(step_of(key), options, timeout=600)
    assert found.status != "fail", found.text
