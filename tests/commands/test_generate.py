"""`generate` on prompts: where they come from, how they are answered, and what is told of it."""

import io
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from export_grok.errors import RankError
from tests.commands.conftest import DEMO, Fails, Refused, Run
from tests.commands.test_processes import ENVIRONMENT, PROGRAM

SHORT = ("--max-new-tokens", 6)
USAGE = {
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "waited_seconds",
    "first_token_seconds",
    "decode_seconds",
    "tokens_per_second",
}


def test_answers_go_to_stdout_and_the_rest_to_stderr(done: Run, demo: Path) -> None:
    one = done("generate", demo, "--prompt", "The lamp", *SHORT)
    assert one.out.endswith("\n")
    assert one.out.count("\n") == 1
    figures = r"6 tokens \(length\); [\d.]+ tokens/s, the first after [\d.]+ s; prompt of 4 tokens"
    assert re.fullmatch(rf"{figures}\nloaded in [\d.]+ s\n", one.err)
    two = done("generate", demo, "--prompt", "The lamp", "--prompt", "x", *SHORT)
    assert two.out.startswith(f"{one.out}\n")
    assert two.out.count("\n") == 3
    assert two.err.count("6 tokens (length); ") == 2


def test_json_answers_are_one_object_a_prompt(done: Run, demo: Path) -> None:
    options = (*SHORT, "--temperature", 1, "--seed", 3)
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
            "usage",
            "load_seconds",
        }
        assert answer["usage"].keys() == USAGE
        assert answer["finish_reason"] in ("stop", "length")
        assert answer["usage"]["new_tokens"] == len(answer["tokens"]) <= 6
    assert answers[0]["text"] + "\n" == plain.out


def ask(done: Run, demo: Path, *options: object, prompt: str = "The lamp") -> Any:
    """Return the answer to a prompt."""
    words = ("generate", demo, "--prompt", prompt, *SHORT, *options, "--json")
    return json.loads(done(*words).out)


def test_a_file_is_a_prompt_to_its_last_byte(
    done: Run, refused: Refused, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The lamp\né\n"
    (tmp_path / "a").write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x")))
    outcome = done("generate", demo, "--file", tmp_path / "a", "--file", "-", *SHORT, "--json")
    from_file, from_stdin = map(json.loads, outcome.out.splitlines())
    for answer, prompt in ((from_file, text), (from_stdin, "x")):
        assert answer["prompt"] == prompt
        assert answer["tokens"] == ask(done, demo, prompt=prompt)["tokens"]
    (tmp_path / "a").write_bytes(b"abc\xff")
    said = refused("generate", demo, "--file", tmp_path / "a")
    assert said == f"{tmp_path / 'a'} is no UTF-8: byte 0xff at 3; a prompt is Unicode text"
    said = refused("generate", demo, "--file", tmp_path / "b")
    assert said == f"{tmp_path / 'b'} cannot be read: No such file or directory"


def test_each_prompt_has_the_next_seed(done: Run, demo: Path) -> None:
    words = ("generate", demo, "--prompt", "a", "--prompt", "a", *SHORT, "--temperature", 1)
    both = [json.loads(line)["tokens"] for line in done(*words, "--json").out.splitlines()]
    alone = [ask(done, demo, "--temperature", 1, "--seed", s, prompt="a") for s in (0, 1)]
    assert both == [answer["tokens"] for answer in alone]
    assert both[0] != both[1]


def test_the_number_of_rows_changes_no_answer(done: Run, demo: Path) -> None:
    prompts = [word for number in range(5) for word in ("--prompt", f"The lamp {number}")]
    words = ("generate", demo, *prompts, *SHORT, "--temperature", 1)
    texts = {done(*words, "--batch", batch).out for batch in (1, 2, 5, 9)}
    assert len(texts) == 1


def test_options_reach_the_answer(done: Run, demo: Path) -> None:
    plain = ask(done, demo)
    stop = plain["text"][3:6]
    stopped = ask(done, demo, "--stop", "never", "--stop", stop)
    assert (stopped["text"], stopped["finish_reason"]) == (plain["text"].split(stop)[0], "stop")

    first = plain["tokens"][0]
    forbidden = ask(done, demo, "--logit-bias", f"{first}=-inf", "--logit-bias", "7=0")
    assert forbidden["tokens"][0] != first
    repeated = ask(done, demo, "--repetition-penalty", 0.001)["tokens"]
    assert len(set(repeated)) < len(set(plain["tokens"]))

    hot = ("--temperature", 5)
    for greedy in (("--min-p", 1), ("--top-k", 1), ("--top-p", 0)):
        assert ask(done, demo, *hot, *greedy)["tokens"] == plain["tokens"]
    assert ask(done, demo, *hot)["tokens"] != plain["tokens"]

    ends = ("--logit-bias", f"{DEMO.eos_token}=100")
    assert ask(done, demo, *ends)["tokens"] == []
    assert ask(done, demo, *ends, "--ignore-eos")["tokens"] == [DEMO.eos_token] * 6


def test_log_probabilities_are_one_entry_a_token(done: Run, demo: Path) -> None:
    answer = ask(done, demo, "--logprobs", 2)
    assert len(answer["logprobs"]) == len(answer["tokens"])
    for token, logprobs in zip(answer["tokens"], answer["logprobs"], strict=True):
        best, second = logprobs["top"]
        assert best == {"token": token, "logprob": logprobs["logprob"]}  # it is greedy
        assert second["logprob"] <= best["logprob"] < 0
        assert math.exp(best["logprob"]) + math.exp(second["logprob"]) <= 1
    assert all(each["top"] == [] for each in ask(done, demo, "--logprobs", 0)["logprobs"])
    assert "logprobs" not in ask(done, demo)


def test_a_prompt_that_fails_shows_its_text_so_far_and_the_others_are_answered(
    run: Run, demo: Path, fails: Fails
) -> None:
    prompts = ("--prompt", "12345", "--prompt", "x")
    fails(lambda tokens: len(tokens) == 8)  # the longer one gets there
    told = run("generate", demo, *prompts, "--max-new-tokens", 4)
    assert told.code == 1
    failed, answered = told.out.removesuffix("\n").split("\n\n")
    assert failed
    assert answered
    lines = told.err.splitlines()
    assert lines[0].startswith("2 tokens (error); ")
    assert lines[1].startswith("4 tokens (length); ")
    assert lines[3] == "Error: 1 of 2 answers ended by an error:"
    assert lines[4].startswith("  prompt 1: step 2: 1 of 1024 logits are NaN")
    assert len(lines) == 5

    outcome = run("generate", demo, *prompts, "--max-new-tokens", 4, "--json")
    assert outcome.code == 1
    first, second = map(json.loads, outcome.out.splitlines())
    assert first["error"]["type"] == "NumericsError"
    assert (first["text"], first["finish_reason"]) == (failed, "error")
    assert (second["text"], second["finish_reason"]) == (answered, "length")
    assert "error" not in second

    alone = run("generate", demo, "--prompt", "12345", "--max-new-tokens", 4)
    assert (alone.code, alone.out) == (1, f"{failed}\n")
    assert alone.err.splitlines()[-1].startswith("Error: step 2: 1 of 1024 logits are NaN")


def test_an_engine_that_dies_is_told_once(run: Run, demo: Path, fails: Fails) -> None:
    def dies(tokens: Sequence[int]) -> bool:
        raise RankError("rank 1 died", rank=1)

    fails(dies)
    outcome = run("generate", demo, "--prompt", "a", "--prompt", "b", "--prompt", "c")
    assert outcome.code == 1
    assert outcome.err.count("rank 1 died") == 1


def test_ctrl_c_leaves_the_text_so_far_and_one_line(demo: Path) -> None:
    # Far more than is done before the signal comes.
    words = ["generate", str(demo), "--prompt", "The lamp", "--ignore-eos"]
    words += [word for number in range(500) for word in ("--prompt", f"{number}")]
    with subprocess.Popen(
        [*PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    ) as process:
        assert process.stdout is not None
        begun = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        printed, told = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    assert len(begun) == 20
    assert printed.endswith("\n")
    assert told.splitlines()[-1].startswith("Aborted. ")
    assert "Traceback" not in told
