"""From nothing to text by the commands; results go to stdout, all else to stderr."""

import json
import shutil
from pathlib import Path

import click
import numpy as np
import pytest

from export_grok import __version__
from export_grok.cli import cli
from export_grok.weights import WeightIndex
from tests.commands.conftest import DEMO, FILES, Run


@pytest.mark.parametrize("command", cli.commands)
def test_every_command_has_help(command: str, done: Run) -> None:
    outcome = done(command, "--help")
    assert outcome.out.startswith(f"Usage: export-grok {command} ")
    assert outcome.err == ""
    assert done(command, "-h").out == outcome.out
    for parameter in cli.commands[command].params:
        if isinstance(parameter, click.Option):
            assert parameter.opts[-1].startswith("--")


def test_the_program_tells_its_commands_and_version(run: Run, done: Run) -> None:
    help_text = done("--help").out
    for command in cli.commands:
        assert f"\n  {command} " in help_text
    assert done("--version").out == f"export-grok, version {__version__}\n"
    assert run().code == 2


@pytest.mark.usefixtures("traced_once")
def test_the_way_from_nothing_to_text_by_its_stages(
    done: Run, tokens: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = done("demo-checkpoint", "ck")
    assert (made.out, made.err) == ("ck: a trained Grok-1 of 3 layers, width 192\n", "")
    found = done("index", "ck", "--out", "index.json")
    assert found.out.startswith(f"59 tensors of 3 layers in {FILES} files, ")
    assert found.err == ""
    assert len(WeightIndex.read(Path("index.json"), root=Path("ck")).weights) == 59
    part = done("index", "ck", "--layers", 1)
    assert part.out.startswith("21 tensors of 1 layers in 14 files, ")
    exported = done("export", "ck", "--out", "graphs")
    assert (exported.out, exported.err) == ("graphs: graphs of 3 layers in float32\n", "")
    built = done("build-engine", "graphs")
    assert built.out == (
        "graphs: ort engine of 3 layers (GrokInt8Linear 12 lowered, GrokMoeExperts 3 lowered, "
        "GrokSoftcapAttention 3 lowered)\n"
    )
    assert built.err == ""
    written = done("logits", "graphs", "--tokens", tokens, "--out", "a.npz", "--decode", 2)
    assert (written.out, written.err) == ("a.npz: logits [2, 5, 1024]\n", "")
    done("logits", demo, "--tokens", tokens, "--out", "b.npz", "--decode", 2)
    with np.load("a.npz") as ours, np.load("b.npz") as of_the_checkpoint:
        assert ours["logits"].dtype == np.float32
        np.testing.assert_array_equal(ours["logits"], of_the_checkpoint["logits"])


@pytest.mark.usefixtures("traced_once")
def test_an_engine_is_built_once(done: Run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    first = done("build-engine", checkpoint, "--out", out)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = done("build-engine", checkpoint, "--out", out)
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


@pytest.mark.usefixtures("traced_once")
def test_inspect_tells_a_checkpoint_graphs_and_a_bundle_apart(
    done: Run, demo: Path, checkpoint: Path, tmp_path: Path
) -> None:
    done("export", checkpoint, "--out", tmp_path / "graphs")
    for path, kind, dtype, backend in (
        (checkpoint, "checkpoint", None, None),
        (tmp_path / "graphs", "graphs", "float32", None),
        (demo, "engine", "float32", "ort"),
    ):
        told = done("inspect", path, "--json", "--bandwidth", 1000)
        assert told.err == ""
        summary = json.loads(told.out)
        assert (summary["kind"], summary["dtype"], summary["backend"]) == (kind, dtype, backend)
        assert (summary["files"], summary["bandwidth"]) == (FILES, 1e12)
        assert summary["config"] == DEMO.to_dict()
        table = done("inspect", path, "--bandwidth", 1000)
        assert table.err == ""
        assert f": {kind}" in table.out.replace("\n", "")
        assert f"{summary['parameters']:,}" in table.out
        assert "1,000 GB/s of memory" in table.out


def test_paths_are_those_of_the_folder_one_stands_in(
    done: Run, demo: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in (("bundle", demo), ("checkpoint", checkpoint)):
        shutil.copytree(path, tmp_path / name)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    options = ("--prompt", "a", "--max-new-tokens", 3)
    texts = set()
    for here, bundle in (("", "bundle"), ("bundle", "."), ("deep/er", "../../bundle")):
        monkeypatch.chdir(tmp_path / here)
        texts.add(done("generate", bundle, *options).out)
    assert len(texts) == 1


@pytest.mark.usefixtures("traced_once")
def test_a_bundle_built_by_relative_paths_runs_from_anywhere(
    done: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    shutil.copytree(checkpoint, tmp_path / "ck")
    monkeypatch.chdir(tmp_path / "here")
    done("build-engine", "../ck", "--out", "../out/bundle")
    monkeypatch.chdir("/")
    for bundle in (tmp_path / "out" / "bundle", (tmp_path / "out" / "bundle").relative_to("/")):
        done("generate", bundle, "--prompt", "a", "--max-new-tokens", 1)
