"""The command line as a user meets it: what goes where, and one line for whatever goes wrong."""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest

from export_grok import __version__
from export_grok.artifacts import MANIFEST, open_bundle
from export_grok.cli import cli, main
from export_grok.config import GrokConfig
from export_grok.export.demo import DEMO_MODEL
from export_grok.weights import WeightIndex
from tests.bundles import BundleOf, bundle_of, checkpoint_copy, hashes, traced_once

__all__ = ["bundle_of", "traced_once"]

DEMO = GrokConfig.from_file(DEMO_MODEL / "config.json")
FILES = 2 + 12 * DEMO.num_layers


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
Refused = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Return what runs a command in this process."""

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, out, err)

    return run


@pytest.fixture
def refused(run: Run) -> Refused:
    """Return what runs a command that must fail in one message, and returns the message."""

    def refused(*arguments: object, code: int = 2) -> str:
        outcome = run(*arguments)
        assert outcome.code == code, outcome
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        usage, _, text = outcome.err.rpartition("Error: ")
        assert "Error: " not in usage
        assert usage == "" or (usage.startswith("Usage: ") and usage.count("Usage: ") == 1)
        return text.rstrip("\n")

    return refused


@pytest.fixture
def done(run: Run) -> Run:
    """Return what runs a command that must succeed."""

    def done(*arguments: object) -> Outcome:
        outcome = run(*arguments)
        assert outcome.code == 0, outcome
        return outcome

    return done


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return a checkpoint of 2 layers that may be damaged."""
    return checkpoint_copy("tiny", tmp_path / "tiny")


@pytest.fixture
def demo(bundle_of: BundleOf) -> Path:
    """Return the demo's bundle; it is shared."""
    return bundle_of("demo").folder


@pytest.fixture
def checkpoint(bundle_of: BundleOf) -> Path:
    """Return the demo's checkpoint; it is shared."""
    return bundle_of("demo").weights_root


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Return where nothing may be left."""
    out = tmp_path / "new" / "out"
    out.parent.mkdir()
    yield out
    assert list(out.parent.iterdir()) == []


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Return a file with two rows of five tokens."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(10).reshape(2, 5) + 4)
    return path


# How a checkpoint is given to each command that takes one.
TAKES_CHECKPOINT = ("index", "export", "build-engine", "inspect")


def on_checkpoint(command: str, checkpoint: Path, out: Path) -> list[object]:
    return [command, checkpoint, *([] if command == "inspect" else ["--out", out])]


class _Evil:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.touched}'",)


@pytest.mark.parametrize("command", TAKES_CHECKPOINT)
def test_a_pickle_that_wants_to_run_a_command_is_refused_and_runs_none(
    command: str, refused: Refused, tiny: Path, out: Path, tmp_path: Path
) -> None:
    evil = pickle.dumps(_Evil(tmp_path / "touched"))
    (tiny / "ckpt-0" / "tensor00001_000").write_bytes(evil)
    text = refused(*on_checkpoint(command, tiny, out))
    assert "tensor00001_000" in text
    assert f"'{os.system.__module__}.system'" in text
    assert "nothing was run" in text
    assert not (tmp_path / "touched").exists()
    pickle.loads(evil)
    assert (tmp_path / "touched").exists(), "the test itself would see nothing"


@pytest.mark.parametrize("command", TAKES_CHECKPOINT)
def test_files_that_are_missing_cut_or_empty_are_named_at_once(
    command: str, refused: Refused, tiny: Path, out: Path
) -> None:
    (tiny / "ckpt-0" / "tensor00003_000").unlink()
    os.truncate(tiny / "ckpt-0" / "tensor00005_000", 1000)
    os.truncate(tiny / "ckpt-0" / "tensor00008_000", 0)
    lines = refused(*on_checkpoint(command, tiny, out)).splitlines()
    assert len(lines) == 4
    assert "(3 faults)" in lines[0]
    assert "tensor00003_000 (layers.0.experts.down.weight" in lines[1]
    assert "is missing" in lines[1]
    assert "tensor00005_000" in lines[2]
    assert "has 1000 of 3431 bytes" in lines[2]
    assert "tensor00008_000" in lines[3]
    assert "has 0 of 3431 bytes" in lines[3]


@pytest.mark.parametrize("command", TAKES_CHECKPOINT)
def test_a_config_of_other_shapes_is_told_with_both(
    command: str, refused: Refused, tiny: Path, out: Path
) -> None:
    config = json.loads((tiny / "config.json").read_bytes())
    (tiny / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    text = refused(*on_checkpoint(command, tiny, out))
    assert "embedding.weight has shape (512, 96); the config asks for (500, 96)" in text


@pytest.mark.parametrize("command", TAKES_CHECKPOINT)
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"num_layers": 0}', "emb_size is missing"),
        ('{"num_layer": 2}', "unknown key 'num_layer', did you mean 'num_layers'?"),
        ("[1]", "holds a list; it must hold an object"),
        ("{", "cannot be read as JSON"),
        (None, "cannot be read as JSON"),
    ],
)
def test_a_wrong_config_is_told_with_its_file(
    config: str | None, said: str, command: str, refused: Refused, tiny: Path, out: Path
) -> None:
    path = tiny / "other.json"
    if config is not None:
        path.write_text(config)
    text = refused(*on_checkpoint(command, tiny, out), "--config", path)
    assert str(path) in text
    assert said in text


@pytest.mark.parametrize("command", ["index", "export", "build-engine"])
@pytest.mark.parametrize("layers", [0, 99, -1])
def test_layers_that_are_not_there_are_refused_with_those_that_are(
    layers: int, command: str, refused: Refused, tiny: Path, out: Path
) -> None:
    text = refused(*on_checkpoint(command, tiny, out), "--layers", layers)
    assert text.startswith(f"{layers} layers were asked for; ")
    assert text.endswith("has 2: use 1 to 2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["buid-engine"], "No such command 'buid-engine'. Did you mean 'build-engine'?"),
        (["nonsense"], "No such command 'nonsense'."),
        (["index"], "Missing argument 'CHECKPOINT'."),
        (["index", "c", "--layer", "2"], "Did you mean '--layers'?"),
        (["index", "c", "--layers", "two"], "'two' is not a valid integer"),
        (["generate", "b", "--promt", "a"], "Did you mean '--prompt'?"),
        (["generate", "b"], "Missing option '--prompt'."),
        (["generate", "b", "--prompt"], "Option '--prompt' requires an argument"),
        (["generate", "b", "--prompt", "a", "--threads", "0"], "0 is not in the range x>=1"),
        (["generate", "b", "--prompt", "a", "--top-p", "many"], "'many' is not a valid float"),
        (["export", "c"], "Missing option '--out'."),
        (["logits", "b", "--tokens", "t", "--out", "o", "--decode", "-1"], "not in the range"),
        (["inspect", "b", "--bandwidth", "0"], "0.0 is not in the range x>0"),
        (["inspect", "b", "--bandwidth", "nan"], "nan is not a finite number"),
        (["inspect", "b", "--bandwidth", "inf"], "inf is not a finite number"),
    ],
)
def test_wrong_use_is_told_with_what_is_right(
    arguments: list[str], said: str, refused: Refused
) -> None:
    assert said in refused(*arguments)


@pytest.mark.parametrize("command", ["export", "build-engine"])
def test_an_unknown_dtype_is_refused_with_those_there_are(
    command: str, refused: Refused, tiny: Path, out: Path
) -> None:
    text = refused(*on_checkpoint(command, tiny, out), "--dtype", "float8")
    assert "'float8' is not one of 'float32', 'float16', 'bfloat16'" in text


def test_an_unknown_backend_is_refused_with_those_there_are(
    refused: Refused, tiny: Path, out: Path
) -> None:
    text = refused("build-engine", tiny, "--out", out, "--backend", "otr")
    assert text.startswith("there is no backend 'otr'; use ort")


def test_a_dtype_that_an_engine_has_not_is_refused_before_anything_is_made(
    refused: Refused, tiny: Path, out: Path
) -> None:
    text = refused("build-engine", tiny, "--out", out, "--dtype", "float16")
    assert text == "the ort engine does not compute in float16; use --dtype float32"


def test_a_bundle_needs_a_place(refused: Refused, tiny: Path) -> None:
    assert refused("build-engine", tiny) == f"say where the bundle of {tiny} goes: --out DIR"


def test_graphs_keep_their_place_and_options(refused: Refused, demo: Path, out: Path) -> None:
    assert "leave --out away" in refused("build-engine", demo, "--out", out)
    text = refused("build-engine", demo, "--dtype", "float32", "--layers", "2")
    assert text.startswith("--dtype, --layers cannot be chosen for graphs that are made")


@pytest.mark.parametrize("command", TAKES_CHECKPOINT)
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("none", "cannot be read: No such file or directory; give the folder of a checkpoint"),
        ("file", "cannot be read: Not a directory; give the folder of a checkpoint"),
        ("empty", "holds no checkpoint; a folder with ckpt-0/tensor00000_000 or with "),
    ],
)
def test_what_is_no_checkpoint_is_told(
    place: str, said: str, command: str, refused: Refused, tmp_path: Path, out: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    text = refused(*on_checkpoint(command, tmp_path / place, out))
    assert text.startswith(f"{tmp_path / place} {said}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", ""], "the prompt has no tokens; give at least one character"),
        (["--prompt", "a", "--prompt", ""], "the prompt has no tokens"),
        (["--prompt", "\udcff"], "it must be Unicode text: read it as UTF-8"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0; it must be 1 or more"),
        (["--max-new-tokens", "-3"], "max_new_tokens is -3; it must be 1 or more"),
        (["--temperature", "-1"], "temperature is -1.0; it must be 0"),
        (["--temperature", "nan"], "temperature is nan; it must be 0"),
        (["--temperature", "inf"], "temperature is inf; it must be 0"),
        (["--top-p", "2"], "top_p is 2.0; it must be a number from 0 to 1"),
        (["--top-p", "nan"], "top_p is nan; it must be a number from 0 to 1"),
        (["--top-k", "-1"], "top_k is -1; it must be a whole number, 0 (off) or more"),
        (["--seed", "-1"], "seed is -1; it must be a whole number from 0"),
        (["--seed", str(2**64)], f"seed is {2**64}; it must be a whole number from 0"),
        (["--max-length", "0"], "max_length is 0; this model takes 1 to 256 tokens"),
        (["--max-length", "257"], "max_length is 257; this model takes 1 to 256 tokens"),
    ],
)
def test_a_request_that_cannot_be_is_refused(
    options: list[str], said: str, refused: Refused, demo: Path
) -> None:
    prompt = [] if "--prompt" in options else ["--prompt", "a"]
    assert said in refused("generate", demo, *prompt, *options)


def test_all_faults_of_a_request_are_told_at_once(refused: Refused, demo: Path) -> None:
    text = refused("generate", demo, "--prompt", "a", "--temperature", -1, "--top-p", 2)
    assert "temperature is -1.0" in text
    assert "top_p is 2.0" in text


def test_a_tensor_parallel_size_that_does_not_divide_is_told_what_does(
    refused: Refused, demo: Path
) -> None:
    text = refused("inspect", demo, "--tp", 3)
    assert "cannot be shared evenly by 3 ranks; use 1, 2, 4, 8" in text


def test_a_prompt_that_does_not_fit_is_told_with_both_numbers(
    refused: Refused, demo: Path
) -> None:
    text = refused("generate", demo, "--prompt", "1" * 600)
    assert "has 601 tokens; a cache of 256 takes 255" in text
    text = refused("generate", demo, "--prompt", "12345678", "--max-length", 4)
    assert "has 9 tokens; a cache of 4 takes 3" in text


@pytest.mark.parametrize("command", ["generate", "logits"])
def test_what_is_no_bundle_is_told(
    command: str, refused: Refused, tiny: Path, tokens: Path, out: Path, tmp_path: Path
) -> None:
    rest = ["--prompt", "a"] if command == "generate" else ["--tokens", tokens, "--out", out]
    text = refused(command, tmp_path / "none", *rest)
    assert text == f"{tmp_path / 'none'} is no folder; give the --out folder of build-engine"
    text = refused(command, tiny, *rest)
    assert f"{tiny} has no manifest.json: it is no bundle" in text


@pytest.mark.usefixtures("traced_once")
def test_graphs_do_not_run(
    run: Run, refused: Refused, checkpoint: Path, tmp_path: Path, demo: Path
) -> None:
    assert run("export", checkpoint, "--out", tmp_path / "graphs").code == 0
    text = refused("generate", tmp_path / "graphs", "--prompt", "a")
    assert "holds graphs and no engine; build one: export-grok build-engine" in text


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_damaged_bundle_is_told_with_all_its_files(
    command: str, refused: Refused, demo: Path, tmp_path: Path
) -> None:
    bundle = shutil.copytree(demo, tmp_path / "bundle")
    (bundle / "layer_02.ort.onnx").unlink()
    os.truncate(bundle / "head.ort.onnx", 10)
    text = refused(command, bundle, *(["--prompt", "a"] if command == "generate" else []))
    assert f"{bundle} cannot be used:" in text
    assert f"{bundle / 'layer_02.ort.onnx'}: No such file or directory" in text
    assert f"{bundle / 'head.ort.onnx'} has 10 bytes, not " in text


def test_weights_that_were_moved_are_asked_for(
    run: Run, refused: Refused, demo: Path, checkpoint: Path, tmp_path: Path
) -> None:
    bundle = shutil.copytree(demo, tmp_path / "a" / "b")
    manifest = json.loads((bundle / MANIFEST).read_bytes())
    manifest["weights"] |= {"relative": "../gone", "absolute": "/gone"}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    options = ("--prompt", "a", "--max-new-tokens", 1)
    assert "say where to with --weights-root" in refused("generate", bundle, *options)
    assert run("generate", bundle, *options, "--weights-root", checkpoint).code == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"text", "cannot be read as .npy"),
        (np.ones((2, 3)), "holds float64[2, 3]; token ids are whole numbers [B, S]"),
        (np.ones(3, np.int64), "holds int64[3]; token ids are whole numbers [B, S]"),
        (np.ones((0, 3), np.int64), "holds no tokens, shape [0, 3]"),
        (np.full((1, 2), 1024), "this model knows 0 to 1023"),
        (np.full((1, 2), -1), "this model knows 0 to 1023"),
        (np.ones((1, 600), np.int32), "rows of 600 tokens; this model takes up to 256"),
    ],
)
def test_tokens_that_cannot_be_are_refused(
    content: object, said: str, refused: Refused, demo: Path, tmp_path: Path, out: Path
) -> None:
    path = tmp_path / "tokens.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, np.asarray(content))
    assert said in refused("logits", demo, "--tokens", path, "--out", out)


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
        "graphs: ort engine of 3 layers (GrokInt8Linear 12 native, GrokMoeExperts 3 native, "
        "GrokSoftcapAttention 3 native)\n"
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


def test_answers_go_to_stdout_and_the_rest_to_stderr(done: Run, demo: Path) -> None:
    one = done("generate", demo, "--prompt", "The lamp", "--max-new-tokens", 5)
    assert one.out.endswith("\n")
    assert one.out.count("\n") == 1
    assert one.err.startswith("5 tokens (length); ")
    assert one.err.count("\n") == 1
    two = done("generate", demo, "--prompt", "The lamp", "--prompt", "x", "--max-new-tokens", 5)
    assert two.out.startswith(f"{one.out}\n")
    assert two.out.count("\n") == 3
    assert two.err.startswith("5 tokens (length), 5 tokens (length); ")


def test_json_answers_are_one_object_a_prompt(done: Run, demo: Path) -> None:
    options = ("--max-new-tokens", 6, "--temperature", 1, "--seed", 3)
    prompts = ("The lamp", "été 灯")
    plain = done("generate", demo, "--prompt", prompts[0], *options)
    outcome = done(
        "generate", demo, "--prompt", prompts[0], "--prompt", prompts[1], *options, "--json"
    )
    assert outcome.err == ""
    answers = [json.loads(line) for line in outcome.out.splitlines()]
    assert [answer["prompt"] for answer in answers] == list(prompts)
    for answer in answers:
        assert answer.keys() == {
            "prompt",
            "text",
            "tokens",
            "finish_reason",
            "load_seconds",
            "prefill_seconds",
            "tokens_per_second",
        }
        assert answer["finish_reason"] in ("stop", "length")
        assert len(answer["tokens"]) <= 6
    assert answers[0]["text"] + "\n" == plain.out


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
    done("generate", tmp_path / "out" / "bundle", "--prompt", "a", "--max-new-tokens", 1)


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
            time.sleep(1)
        printed, told = process.communicate()
    assert process.returncode == 130
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
