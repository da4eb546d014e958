"""`doctor` tells what runs here and why on one screen; `inspect` tells which kernels would."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from export_grok import __version__
from export_grok.engines.installation import EXTRAS, sentence
from export_grok.plugins.kernels import native_kernels
from tests.commands.conftest import Run
from tests.test_imports import loaded_by


def test_one_screen_tells_what_there_is(done: Run) -> None:
    told = done("doctor")
    assert told.err == ""
    lines = told.out.splitlines()
    assert len(lines) <= 30
    names = [line[:15].strip() for line in lines if not line.startswith(" ")]
    assert names[:5] == ["export-grok", "Python", "machine", "CPU kernels", "ONNX Runtime"]
    assert names[5:-1] == [f"[{extra}]" for extra in EXTRAS]
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
