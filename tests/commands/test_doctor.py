"""`doctor` tells what runs here and why on one screen; `inspect` tells which kernels would."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from export_grok import __version__
from export_grok.engines.installation import EXTRAS, sentence
from export_grok.plugins.kernels import native_kernels
from tests.commands.conftest import Run
from tests.engines.fake_driver import Card, FakeMachine, machine_of
from tests.test_imports import loaded_by


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what GPUs this machine may have."""
    machine_of(monkeypatch, None)


def test_one_screen_tells_what_there_is(done: Run) -> None:
    told = done("doctor")
    assert told.err == ""
    lines = told.out.splitlines()
    assert len(lines) <= 30
    names = [line[:15].strip() for line in lines if not line.startswith(" ")]
    assert names[:5] == ["export-grok", "Python", "machine", "CPU kernels", "ONNX Runtime"]
    assert names[5:-2] == [f"[{extra}]" for extra in EXTRAS]
    assert names[-2] == "GPUs"
    assert __version__ in lines[0]
    assert metadata.version("onnxruntime") in told.out
    assert sentence(native_kernels()) in " ".join(told.out.split())
    assert lines[-1] == "Engines run here."


def test_a_program_is_told_the_same(done: Run) -> None:
    told = done("doctor", "--json")
    value = json.loads(told.out)
    assert told.err == ""
    assert value["faults"] == []
    assert value["version"] == __version__
    assert value["kernels"]["reason"] == native_kernels().reason
    assert [extra["name"] for extra in value["extras"]] == list(EXTRAS)
    assert value["machine"]["cores"] >= 1


def test_without_a_driver_one_line_says_what_runs(done: Run) -> None:
    told = done("doctor")
    assert (
        "GPUs            no NVIDIA driver here: engines for the CPU run, those of trt" in told.out
    )
    gpus = json.loads(done("doctor", "--json").out)["gpus"]
    assert (gpus["driver"], gpus["devices"], gpus["findings"]) == (None, [], [])


def test_8_equal_gpus_take_three_lines_and_nothing_is_found(
    done: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_of(monkeypatch, FakeMachine(cards=[Card()] * 8))
    told = done("doctor")
    at = told.out[told.out.index("GPUs  ") :].splitlines()
    assert at[0] == "GPUs            driver 580.65.06, for CUDA 13.0; 85.0 GB free"
    assert at[1] == "                8 x NVIDIA H100 80GB HBM3, SM90, 85.5 GB"
    assert at[2].startswith("                all reach each other's memory; NCCL 2.27.5; ")
    assert at[-1] == "Engines run here."
    assert "finding" not in told.out


def test_each_finding_is_told_and_engines_still_run(
    done: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_of(monkeypatch, FakeMachine(cards=[Card(), Card()], apart={(0, 1)}, nccl=None))
    told = done("doctor")
    assert told.out.count("  finding ") == 2
    assert told.out.splitlines()[-1] == "Engines run here."
    gpus = json.loads(done("doctor", "--json").out)["gpus"]
    assert gpus["apart"] == [[0, 1]]
    assert len(gpus["findings"]) == 2
    assert [device["sm"] for device in gpus["devices"]] == [90, 90]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_keeps_engines_from_running_is_told_after_all_else(
    options: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    monkeypatch.setenv("EXPORT_GROK_KERNELS", "fast")
    told = run("doctor", *options)
    assert told.code == 1
    assert "Engines run here" not in told.out
    assert told.out.startswith('{"version"' if options else "export-grok")
    first, second = told.err.splitlines()
    assert first.startswith("Error: ONNX Runtime, which runs the engines, is not installed: pip ")
    assert second == "  EXPORT_GROK_KERNELS is 'fast'; it must be native, builtin or unset"


def test_it_loads_no_package_that_it_tells_of() -> None:
    assert loaded_by("doctor") == {"numpy"}


def test_inspect_tells_the_kernels_that_an_engine_would_run_by(
    done: Run, demo: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in ("", "builtin"):
        monkeypatch.setenv("EXPORT_GROK_KERNELS", choice)
        kernels = native_kernels()
        assert done("inspect", demo).out.endswith(f"\nkernels here: {sentence(kernels)}\n")
        assert json.loads(done("inspect", demo, "--json").out)["kernels"] == {
            "library": kernels.library and str(kernels.library),
            "isa": kernels.isa,
            "reason": kernels.reason,
        }
    assert kernels.library is None
    assert "kernels here" not in done("inspect", checkpoint).out
    assert "kernels" not in json.loads(done("inspect", checkpoint, "--json").out)
