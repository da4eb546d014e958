"""`generate --jsonl`: a file of requests becomes a file of answers, broken off or not."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import hashes
from tests.commands.conftest import Fails, Refused, Run
from tests.commands.test_processes import ENVIRONMENT, PROGRAM

REQUESTS: Sequence[dict[str, Any]] = [
    {"prompt": "The lamp", "id": "a"},
    {"tokens": [9, 8, 7], "max_new_tokens": 3, "temperature": 0},
    {"prompt": "x", "id": 3, "seed": 9},
]
OPTIONS = ("--max-new-tokens", 5, "--temperature", 1, "--seed", 2)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Return a file of three requests."""
    return write(tmp_path / "in.jsonl", REQUESTS)


def write(path: Path, requests: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def answers(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in out.read_bytes().splitlines()]
    for answer in found:
        del answer["usage"]
    return found


def test_each_line_is_answered_as_its_prompt_would_be(
    done: Run, demo: Path, requests: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = ("generate", demo, "--jsonl", requests, "--out", out, *OPTIONS)
    outcome = done(*words)
    assert (outcome.out, outcome.err) == (f"{out}: 3 answers\n", "")
    first, second, third = answers(out)
    assert (first["id"], third["id"], "id" in second) == ("a", 3, False)
    alone = done("generate", demo, "--prompt", "The lamp", *OPTIONS, "--json")
    assert first["tokens"] == json.loads(alone.out)["tokens"]
    assert len(second["tokens"]) == 3
    alone = done("generate", demo, "--prompt", "x", *OPTIONS, "--seed", 9, "--json")
    assert third["tokens"] == json.loads(alone.out)["tokens"]

    before = hashes(tmp_path)
    assert done(*words).out == f"{out}: 3 answers, 3 of them from before\n"
    assert hashes(tmp_path) == before


def test_an_output_of_other_options_is_replaced_only_when_told_to(
    done: Run, refused: Refused, demo: Path, requests: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = ("generate", demo, "--jsonl", requests, "--out", out, *OPTIONS)
    done(*words)
    before = hashes(tmp_path)
    said = refused(*words, "--top-k", 1, code=1)
    assert "replace it with --overwrite, or choose another --out" in said
    assert hashes(tmp_path) == before
    done(*words, "--top-k", 1, "--overwrite")
    assert hashes(tmp_path) != before


def test_a_dry_run_checks_all_lines_and_leaves_nothing(
    done: Run, refused: Refused, demo: Path, requests: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new.jsonl"
    words = ("generate", demo, "--jsonl", requests, "--out", out, "--dry-run")
    said = done(*words).out.splitlines()
    assert said[0].startswith("needs ")
    assert said[1:] == [f"writes the answers into {out}"]
    assert list(hashes(tmp_path)) == ["in.jsonl"]
    write(requests, [{"prompt": "a"}, {"promt": "b"}, {"prompt": "c " * 300}])
    assert refused(*words).splitlines() == [
        f"2 lines are wrong in {requests}; nothing was run:",
        "  line 2: unknown field 'promt', did you mean 'prompt'?; it has neither prompt nor "
        "tokens; give one of them",
        "  line 3: the prompt has 301 tokens; a cache of 256 takes 255 and an answer of one: "
        "shorten the prompt or raise max_length",
    ]
    assert list(hashes(tmp_path)) == ["in.jsonl"]


def test_a_request_that_fails_is_counted_and_the_exit_code_tells(
    run: Run, demo: Path, requests: Path, tmp_path: Path, fails: Fails
) -> None:
    fails(lambda tokens: 9 in tokens)
    out = tmp_path / "out.jsonl"
    words = ("generate", demo, "--jsonl", requests, "--out", out, *OPTIONS)
    for before in ("", ", 3 of them from before"):
        outcome = run(*words)
        assert outcome.code == 1
        assert outcome.out == f"{out}: 3 answers{before}\n"
        assert outcome.err == f"Error: 1 of 3 answers ended by an error; see `error` in {out}\n"
    assert [answer.get("error", {}).get("type") for answer in answers(out)] == [
        None,
        "NumericsError",
        None,
    ]


Break = Callable[[subprocess.Popen[str]], None]


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("broken_off", [_kill, _interrupt])
def test_a_run_that_is_broken_off_goes_on_by_the_same_command(
    broken_off: Break, done: Run, demo: Path, tmp_path: Path
) -> None:
    requests = write(
        tmp_path / "in.jsonl",
        [{"prompt": f"The lamp {number}", "ignore_eos": True} for number in range(24)],
    )
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    words = ["generate", str(demo), "--jsonl", str(requests), "--max-new-tokens", "40"]
    words += ["--batch", "2"]
    with subprocess.Popen(
        [*PROGRAM, *words, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    ) as process:
        while process.poll() is None and _lines(part) <= 2:
            time.sleep(0.01)
        broken_off(process)
        printed, told = process.communicate(timeout=60)
    assert printed == ""
    assert not out.exists()
    there = _lines(part)
    assert 2 < there < 24
    if broken_off is _interrupt:
        assert process.returncode in (130, -signal.SIGINT)
        first, *_, last = told.splitlines()
        assert first == f"{part} has the answers so far"
        assert last.startswith("Aborted. A stage that writes files goes on ")
    assert done(*words, "--out", out).out == f"{out}: 24 answers, {there} of them from before\n"
    assert not part.exists()
    if broken_off is _kill:
        done(*words, "--out", tmp_path / "unbroken.jsonl")
        assert answers(out) == answers(tmp_path / "unbroken.jsonl")
