"""`export-grok bench`: figures on stdout and nothing else, refusals in one line."""

import json
from pathlib import Path

import pytest

from tests.bundles import BundleOf
from tests.commands.conftest import Refused, Run
from tests.test_imports import loaded_by

QUICK = ("--rounds", 2, "--decode-tokens", 2, "--prompt-tokens", "5,9", "--context", "3")


@pytest.fixture(autouse=True)
def short_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ceiling be measured for a moment only."""
    monkeypatch.setattr("export_grok.runtime.bench.ceiling.SECONDS", 0.005)


@pytest.fixture
def tiny_bundle(bundle_of: BundleOf) -> Path:
    """Return the bundle of the tiny fixture model, which takes 64 tokens; it is shared."""
    return bundle_of("tiny").folder


@pytest.mark.parametrize("kernels", ["builtin", ""])
def test_json_is_one_document_with_every_sample(
    kernels: str, done: Run, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPORT_GROK_KERNELS", kernels)
    outcome = done("bench", tiny_bundle, *QUICK, "--batch", "1,3", "--threads", 2, "--json")
    assert outcome.err == ""
    assert outcome.out.count("\n") == 1
    value = json.loads(outcome.out)
    assert value.keys() == {
        "engine",
        "machine",
        "options",
        "ceiling",
        "prefill",
        "decode",
        "doubts",
    }
    measured = [(each["stage"], each["batch"], each["tokens"]) for each in value["prefill"]]
    measured += [(each["stage"], each["batch"], each["tokens"]) for each in value["decode"]]
    assert measured == [
        ("prefill", 1, 5),
        ("prefill", 1, 9),
        ("decode", 1, 3),
        ("decode", 3, 3),
    ]
    for each in (*value["prefill"], *value["decode"]):
        assert len(each["samples"]) == 2
        steps = 2 if each["stage"] == "decode" else 1
        assert {len(sample["seconds"]) for sample in each["samples"]} == {steps}
        assert each["tokens_per_second"]["median"] > 0
    assert len(value["ceiling"]["samples"]) == 2 * 4 + 1
    assert value["engine"]["load_seconds"].keys() == {"1", "3"}
    assert value["engine"]["backend"] == "ort"
    assert (value["engine"]["kernels"]["library"] is None) == (
        value["ceiling"]["method"] != "four streams a thread"
    )
    if kernels:
        assert value["engine"]["kernels"]["library"] is None
    assert value["machine"]["threads"] == 2
    assert any("too few rounds" in doubt for doubt in value["doubts"])
    # 2 layers, 2 heads of 16, float32; after 3 tokens 4 and 5 are attended to.
    assert value["decode"][0]["step_bytes"]["cache"] == 2 * 2 * 2 * 16 * 4 * 4.5
    assert value["decode"][1]["step_bytes"]["experts_per_layer"] == 8 * (1 - 0.75**3)


def test_a_table_is_all_there_is_on_stdout(done: Run, tiny_bundle: Path) -> None:
    outcome = done("bench", tiny_bundle, "--rounds", 2, "--decode-tokens", 2)
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0].startswith(str(tiny_bundle)[:20])
    rows = [line.split()[:2] for line in lines if line.startswith("    1 ")]
    # The defaults, shortened to the 64 tokens that this model takes.
    assert rows == [["1", "63"], ["1", "32"], ["1", "62"]]
    assert "DOUBTFUL: " in outcome.out
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn_beside_the_table(
    suffix: str, done: Run, tiny_bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="extra plot is not installed")
    picture = tmp_path / f"speed{suffix}"
    outcome = done("bench", tiny_bundle, *QUICK, "--batch", "1,2", "--plot", picture)
    assert outcome.err == ""
    assert [path.name for path in tmp_path.iterdir()] == [picture.name]
    assert picture.read_bytes().startswith({".png": b"\x89PNG", ".svg": b"<?xml"}[suffix])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--context", "63"), "context 63 is too long; it must be 1 to 48, as this model takes"),
        (("--prompt-tokens", "9,64"), "prompt_tokens 64 is too long; it must be 1 to 63"),
        (("--decode-tokens", 64), "decode_tokens is 64; this model takes 64 tokens, so 1 to 63"),
        (("--batch", "0"), "batch is 0; it must be numbers from 1"),
        (("--rounds", 0), "rounds is 0; it must be 1 or more"),
        (("--batch", "1,x"), "'1,x' is no list of whole numbers; write it as 1,4."),
        (("--context", ""), "'' is no list of whole numbers"),
        (("--plot", "speed.doc"), "speed.doc is no picture this can draw; end it in .png"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(
    options: tuple[object, ...], said: str, refused: Refused, tiny_bundle: Path
) -> None:
    text = refused("bench", tiny_bundle, *options)
    assert said in text
    assert "\n" not in text


def test_a_picture_that_cannot_be_written_is_told_before_anything_is_measured(
    refused: Refused, tiny_bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="extra plot is not installed")
    text = refused("bench", tiny_bundle, "--plot", tmp_path / "none" / "speed.png", code=1)
    assert text.startswith(f"cannot write {tmp_path / 'none' / 'speed.png'}: ")
    assert "\n" not in text


def test_what_is_no_bundle_and_kernels_that_are_not_there_are_told(
    refused: Refused, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused("bench", tmp_path).startswith(f"{tmp_path} has no manifest.json")
    monkeypatch.setenv("EXPORT_GROK_KERNELS", "fastest")
    assert "EXPORT_GROK_KERNELS is 'fastest'" in refused("bench", tiny_bundle)


def test_a_benchmark_loads_neither_torch_nor_onnx(tiny_bundle: Path) -> None:
    options = map(str, QUICK)
    loaded = loaded_by("bench", str(tiny_bundle), *options, "--json")
    assert loaded == {"numpy", "ml_dtypes", "onnxruntime"}
