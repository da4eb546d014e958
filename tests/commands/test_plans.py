"""TensorRT by commands: what cannot be built is said before work, what is built is shown."""

from pathlib import Path

import pytest

from tests.commands.conftest import Refused, Run
from tests.conftest import cuda_devices

SMALL = ("--batch", 2, "--chunk", 16, "--max-length", 32)
NEEDS_RTX = "TensorRT-RTX is not installed"


@pytest.mark.skipif(cuda_devices() > 0, reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_is_missing_and_what_builds_here(
    refused: Refused, tiny: Path, out: Path
) -> None:
    text = refused("build-engine", tiny, "--out", out, "--backend", "trt", *SMALL, code=1)
    assert "no NVIDIA driver" in text
    assert "--backend trt-rtx builds on a CPU" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sm", "90"), "tensorrt_rtx builds no plans for SM90; use --sm 80,86,89,120"),
        (("--sm", "8x"), "'8x' is no list of architectures; write e.g. 80,89,120"),
        (("--sm", "89", "--tp", 3), "cannot be shared evenly by 3 ranks; use 1, 2"),
        (("--sm", "89", "--batch", 0), "batch is 0; it must be 1 or more"),
        (("--sm", "89", "--batch", 2000), "batch is 2000; graphs are made for up to 1024"),
        (("--sm", "89", "--gpu-memory", 0.0001), "one GPU needs 0.0 GB"),
        (("--sm", "89", "--gpu-memory", "nan"), "gpu_memory is nan; it must be a number of GB"),
        (("--sm", "89", "--dtype", "int8"), "'int8' is not one of"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_written(
    options: tuple[object, ...], said: str, refused: Refused, tiny: Path, out: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason=NEEDS_RTX)
    assert said in refused("build-engine", tiny, "--out", out, "--backend", "trt-rtx", *options)


def test_options_of_plans_are_refused_for_the_cpu(refused: Refused, tiny: Path, out: Path) -> None:
    text = refused("build-engine", tiny, "--out", out, "--sm", "89", "--tp", 2)
    assert "--sm: the ort engine runs on one CPU" in text


@pytest.mark.skipif(cuda_devices() > 0, reason="there is a GPU")
@pytest.mark.usefixtures("traced_once")
def test_plans_are_built_shown_and_without_a_gpu_do_not_run_but_are_interpreted(
    done: Run, refused: Refused, tiny: Path, tmp_path: Path, tokens: Path, out: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason=NEEDS_RTX)
    engine = tmp_path / "engine"
    options = ("--backend", "trt-rtx", "--sm", "89", *SMALL)
    built = done("build-engine", tiny, "--out", engine, *options)
    said = "8 plans of 8 graphs for SM89: 2 rows of 32 tokens, chunks of 16"
    assert said in built.out
    assert f"engine: {said}" in done("inspect", engine).out
    text = refused("logits", engine, "--tokens", tokens, "--out", out, code=1)
    assert "TensorRT plans need an NVIDIA GPU" in text
    quick = ("--prompt", 20, "--tokens", 2, "--threads", 1)
    assert f"export-grok verify {engine} --interpret" in refused("verify", engine, *quick, code=1)
    outcome = done("verify", engine, *quick, "--interpret")
    assert outcome.err == ""
    for said in (
        "graphs of trt-rtx plans, interpreted in float32 by ONNX Runtime",
        "NOTE: no plan ran: the graphs they are built from were interpreted in float32",
        "running free",
        "PASSED",
    ):
        assert said in " ".join(outcome.out.split())


def test_an_engine_that_runs_on_a_cpu_is_not_interpreted(refused: Refused, demo: Path) -> None:
    text = refused("verify", demo, "--interpret")
    assert f"the ort engine in {demo} runs here: leave --interpret away" in text
