"""`chat`: lines in, answers out, and what was said is neither computed twice nor lost."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import open_bundle
from export_grok.runtime import GenerationParams, load
from export_grok.runtime.text.tokenizer import tokenizer_of
from tests.commands.conftest import Answers, Fails, Outcome, Refused, Run
from tests.commands.test_processes import ENVIRONMENT, PROGRAM

SHORT = ("--max-new-tokens", 5)

Chat = Callable[..., Outcome]


@pytest.fixture
def chat(run: Run, demo: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Return what has a conversation through pipes: lines, then options."""

    def chat(lines: str, *options: object) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return run("chat", demo, *(options or SHORT))

    return chat


def test_each_line_is_answered_behind_all_that_was_said(chat: Chat, demo: Path) -> None:
    outcome = chat("The lamp\n\n  \nAnd the king")
    assert outcome.code == 0
    with load(demo, batch=1) as model:
        params = GenerationParams(max_new_tokens=5, stop="\nUser:")
        talk = model.conversation()
        first = talk.say("User: The lamp\nGrok:", params).result()
        second = talk.say("\nUser: And the king\nGrok:", params).result()
    assert outcome.out == f"{first.text}\n{second.text}\n"
    told = outcome.err.splitlines()
    assert len(told) == 2
    assert re.fullmatch(rf".*; prompt of {len(first.prompt_tokens)} tokens", told[0])
    cached = len(first.prompt_tokens) + len(first.tokens) - 1  # all but the last token made
    assert told[1].endswith(
        f"; prompt of {len(second.prompt_tokens)} tokens ({cached} of them in the cache)"
    )


def test_raw_lines_are_sent_as_they_are(chat: Chat, demo: Path) -> None:
    outcome = chat("The lamp\n, and//\n//x\n", "--raw", *SHORT)
    with load(demo, batch=1) as model:
        params = GenerationParams(max_new_tokens=5)
        talk = model.conversation()
        texts = [talk.say(line, params).result().text for line in ("The lamp", ", and//", "/x")]
    assert outcome.out == "".join(f"{text}\n" for text in texts)


def test_what_stands_before_lines_and_answers_can_be_chosen(chat: Chat, demo: Path) -> None:
    outcome = chat("a\nb\n/save out.txt\n", "--user", "Q:", "--reply", " A:", *SHORT)
    first, second = outcome.out.splitlines()
    text = Path("out.txt").read_text()
    assert text == f"Q:a A:{first}\nQ:b A:{second}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a folder of the test."""
    monkeypatch.chdir(tmp_path)


def test_an_answer_ends_where_the_next_line_would_begin(
    chat: Chat, demo: Path, answers: Answers
) -> None:
    ids = tokenizer_of(open_bundle(demo)).encode_more(" fine.\nUser: and more of")

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        said = max(n for n in range(len(ids)) if list(tokens[len(tokens) - n :]) == ids[:n])
        logits = np.zeros(vocabulary, np.float32)
        logits[ids[said]] = 1
        return logits

    answers(logits_of)
    outcome = chat("a\nb\n/save out.txt\n", "--max-new-tokens", 99)
    assert outcome.out == " fine.\n fine.\n"
    assert outcome.err.count("(stop); ") == 2
    text = "User: a\nGrok: fine.\nUser: b\nGrok: fine.\n"
    assert Path("out.txt").read_text() == text


def test_turns_are_taken_back_and_begun_anew(chat: Chat) -> None:
    told = chat(
        "a\n/usage\nb\n/rewind\n/usage\nb\nc\n/rewind 2\n/rewind 9\n/rewind x\n/reset\n/usage\n"
    )
    lines = [line for line in told.err.splitlines() if "tokens/s" not in line]
    after_one, rewound, again, rewound_two, too_many, no_number, empty = lines
    assert re.match(r"\d+ of 256 tokens, turns: 1; new tokens in all: \d", after_one)
    same = after_one.split(";")[0]
    assert [line.split(";")[0] for line in (rewound, again, rewound_two)] == [same] * 3
    assert too_many == "9 turns cannot be taken back; this conversation has 1"
    assert no_number == "/rewind takes a number of turns, not 'x'"
    assert empty.startswith("0 of 256 tokens, turns: 0; ")


def test_the_next_answer_has_the_next_seed_also_behind_a_rewind(chat: Chat) -> None:
    options = ("--temperature", 5, *SHORT)
    first, second, third = chat("a\n/rewind\na\n/rewind\na\n", *options).out.splitlines()
    assert len({first, second, third}) == 3
    assert chat("a\n", *options, "--seed", 2).out == f"{third}\n"


def test_commands_tell_what_there_is_and_what_is_wrong(chat: Chat) -> None:
    Path("there").write_text("precious")
    outcome = chat("/help\n/rewnd\n/zzz\n/save\n/save there\n/save no/where\n/quit\nnever\n")
    assert (outcome.code, outcome.out) == (0, "")
    *help_text, near, far, unnamed, there, nowhere = outcome.err.splitlines()
    for command in ("/rewind", "/reset", "/usage", "/save", "/quit"):
        assert sum(line.startswith(command) for line in help_text) == 1
    assert near == "there is no command /rewnd; did you mean /rewind?"
    assert far == "there is no command /zzz; /help tells the commands"
    assert unnamed == "/save needs the name of a file"
    assert there == "there is there already; name a new file"
    assert nowhere.startswith("cannot write no/where: No such file or directory")
    assert Path("there").read_text() == "precious"


def test_what_was_said_is_saved_whole(chat: Chat) -> None:
    outcome = chat("é\nb\n/save out.txt\n")
    first, second = outcome.out.splitlines()
    text = f"User: é\nGrok:{first}\nUser: b\nGrok:{second}\n"
    assert Path("out.txt").read_text(encoding="utf-8") == text
    assert outcome.err.splitlines()[-1] == f"out.txt: {len(text) - 1} characters"


def test_a_full_context_is_told_with_both_figures_and_the_way_out(chat: Chat, demo: Path) -> None:
    outcome = chat(
        "a\n" + "b " * 300 + "\n/usage\n" + "c\n/reset\nd\n",
        "--ignore-eos",
        "--max-new-tokens",
        999,
    )
    assert outcome.code == 0
    told = outcome.err.splitlines()
    way = "/rewind [N] takes turns back, /reset all of them"
    assert told[1] == f"the context is full: all 256 tokens; {way}"
    assert told[2].startswith("the context is full: 256 of 256 tokens, and this line has ")
    assert told[2].endswith(way)
    assert told[3].startswith("256 of 256 tokens, turns: 1; ")
    assert told[4].startswith("the context is full: 256 of 256 tokens, and this line has ")
    assert len(outcome.out.splitlines()) >= 2  # of a and d

    bundle = open_bundle(demo)
    line = "b" * 300
    needed = len(tokenizer_of(bundle).encode(f"User: {line}\nGrok:"))
    told = chat(f"{line}\n").err.splitlines()
    assert told[0].startswith(f"the context is full: 0 of 256 tokens, and this line has {needed},")


def test_a_line_that_is_no_text_is_told_and_the_talk_goes_on(
    demo: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nb\n"), "utf-8"))
    outcome = run("chat", demo, *SHORT)
    assert outcome.code == 0
    assert outcome.out.count("\n") == 1
    assert "half of a surrogate pair" in outcome.err.splitlines()[0]


def test_an_answer_that_fails_is_told_and_the_talk_goes_on(chat: Chat, fails: Fails) -> None:
    fails(lambda tokens: len(tokens) == 18)
    outcome = chat("a\n/rewind\na\n", "--max-new-tokens", 9)
    assert outcome.code == 0
    assert outcome.err.count("logits are NaN") == 2


def test_a_dry_run_reads_no_line(done: Run, refused: Refused, demo: Path) -> None:
    said = done("chat", demo, "--dry-run")
    assert said.out.startswith("needs ")
    assert said.out.endswith("\nwrites nothing\n")
    assert "max_length is 999" in refused("chat", demo, "--max-length", 999, "--dry-run")
    assert "temperature is -1.0" in refused("chat", demo, "--temperature", -1)


def test_ctrl_c_ends_an_answer_and_what_it_had_was_said(
    chat: Chat, answers: Answers, demo: Path
) -> None:
    pressed: list[float] = []

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        if len(tokens) == 30 and not pressed:
            while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                time.sleep(0.001)  # until the answer is waited for
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        if pressed and time.monotonic() < pressed[0] + 0.5:
            time.sleep(0.01)  # and there is time for it to work
        logits = np.zeros(vocabulary, np.float32)
        logits[200 + len(tokens)] = 1
        return logits

    answers(logits_of)
    outcome = chat("a\n/save out.txt\nb\n", "--raw", "--max-new-tokens", 250)
    assert outcome.code == 0
    cancelled, _, second, *_ = outcome.err.splitlines()
    assert re.match(r"\d+ tokens \(cancelled\); ", cancelled)
    assert 28 <= int(cancelled.split()[0]) < 250
    first = outcome.out.splitlines()[0]
    assert Path("out.txt").read_text() == f"a{first}\n"
    assert "(length); " in second  # and the talk went on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_on_a_terminal_lines_are_asked_for_and_ctrl_c_there_is_the_way_out(demo: Path) -> None:
    ours, theirs = os.openpty()

    def shown_to(end: bytes) -> bytes:
        shown = b""
        while not shown.endswith(end):
            shown += os.read(ours, 1)
        return shown

    with subprocess.Popen(
        [*PROGRAM, "chat", str(demo), *map(str, SHORT)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        os.close(theirs)
        shown_to(b"> ")
        os.write(ours, b"The lamp\n")
        shown_to(b"The lamp\r\n")
        answer = shown_to(b"\r\n> ")
        # An interrupt between the prompt and the wait for a key is only seen with the next key.
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        _, told = process.communicate()
    os.close(ours)
    assert process.returncode == 130
    assert len(answer) > len(b"\r\n> ")
    assert told.startswith(b"5 tokens (length); ")
    assert told.count(b"\n") == 1
