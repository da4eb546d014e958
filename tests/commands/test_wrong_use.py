"""Whatever is wrong is told in one message that says what would be right; nothing is left."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from export_grok.artifacts import MANIFEST
from tests.commands.conftest import Refused, Run

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
        (["generate", "b", "--promt", "a"], "Did you mean one of: '--out', '--prompt'?"),
        (["generate", "b"], "there is no prompt; give one of --prompt, --file and --jsonl."),
        (["generate", "b", "--prompt", "a", "--file", "f"], "--prompt and --file are given; give"),
        (["generate", "b", "--file", "-", "--file", "-"], "stdin is read once"),
        (
            ["generate", "b", "--prompt", "a", "--out", "o"],
            "--out and --overwrite go with --jsonl",
        ),
        (["generate", "b", "--jsonl", "i"], "--jsonl needs --out"),
        (["generate", "b", "--jsonl", "i", "--out", "./i"], "--jsonl and --out are one file"),
        (["generate", "b", "--jsonl", "i", "--out", "o", "--json"], "--json goes with --prompt"),
        (["generate", "b", "--prompt", "a", "--batch", "0"], "0 is not in the range x>=1"),
        (["generate", "b", "--prompt", "a", "--logit-bias", "5"], "'5' is no token id with a n"),
        (["generate", "b", "--prompt", "a", "--logit-bias", "x=1"], "'x=1' is no token id"),
        (
            ["generate", "b", "--prompt", "a", "--logit-bias", "5=1", "--logit-bias", "5=2"],
            "token 5 is given twice",
        ),
        (["chat", "b", "--promt", "a"], "No such option '--promt'."),
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
        (["--max-new-tokens", "0"], "max_new_tokens is 0; it must be a whole number, 1 or"),
        (["--max-new-tokens", "-3"], "max_new_tokens is -3; it must be a whole number, 1 or"),
        (["--temperature", "-1"], "temperature is -1.0; it must be 0"),
        (["--temperature", "nan"], "temperature is nan; it must be 0"),
        (["--temperature", "inf"], "temperature is inf; it must be 0"),
        (["--top-p", "2"], "top_p is 2.0; it must be a number from 0 to 1"),
        (["--top-p", "nan"], "top_p is nan; it must be a number from 0 to 1"),
        (["--top-k", "-1"], "top_k is -1; it must be a whole number, 0 (off) or more"),
        (["--seed", "-1"], "seed is -1; it must be a whole number from 0"),
        (["--seed", str(2**64)], f"seed is {2**64}; it must be a whole number from 0"),
        (["--min-p", "2"], "min_p is 2.0; it must be a number from 0 (off) to 1"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0; it must be a positive"),
        (["--stop", ""], "stop has an empty text"),
        (["--logprobs", "-1"], "logprobs is -1; it must be None (off) or a whole number from 0"),
        (["--logit-bias", "5000=1"], "logit_bias has 5000; a token id of this model"),
        (["--logit-bias", "5=nan"], "logit_bias has 5: nan; it must be"),
        (["--max-length", "1"], "max_length is 1; this model takes 2 to 256 tokens"),
        (["--max-length", "257"], "max_length is 257; this model takes 2 to 256 tokens"),
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
