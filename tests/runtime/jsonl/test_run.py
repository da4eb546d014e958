"""A file of answers is what the requests give one by one, whatever broke the runs before it."""

import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.errors import BundleError, OutputError, RankError, RequestError
from export_grok.needs import Needs
from export_grok.runtime.jsonl.run import Answered, answer_file, part_of
from export_grok.runtime.model import Model
from export_grok.runtime.model_to_load import ModelToLoad
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.prompt_file import STDIN
from tests.runtime.fake_session import FakeSession, logits_after
from tests.runtime.jsonl.conftest import Write

Opened = Callable[..., list[FakeSession]]

DEFAULTS = GenerationParams(temperature=1.0, seed=5, max_new_tokens=6)
REQUESTS: list[dict[str, Any]] = [
    {"prompt": f"The lamp {n}", "id": f"é {n}", "max_new_tokens": 1 + n % 7} for n in range(20)
]
REQUESTS[3] = {"tokens": [9, 9, 9], "logprobs": 2}
REQUESTS[11] = {"prompt": "one", "temperature": 0, "ignore_eos": True}


def answers(out: Path) -> list[dict[str, Any]]:
    """Return the answers in a file, without what differs from run to run."""
    found = [json.loads(line) for line in out.read_bytes().splitlines()]
    for answer in found:
        assert answer.pop("usage")["new_tokens"] == len(answer["tokens"])
    return found


@pytest.fixture
def unbroken(model: ModelToLoad, write: Write, made_up: Opened, tmp_path: Path) -> Path:
    """Return the answers of a run that nothing broke."""
    made_up()
    out = tmp_path / "unbroken.jsonl"
    assert answer_file(model, write(REQUESTS), out, DEFAULTS, batch=3) == Answered(
        answers=20, found=0, errors=0
    )
    return out


def test_the_answers_are_those_to_each_request_alone(
    unbroken: Path, model: ModelToLoad, tmp_path: Path
) -> None:
    found = answers(unbroken)
    assert [answer["line"] for answer in found] == list(range(1, 21))
    with model.load(
        reach_of(model), batch=1, max_waiting=1, on_needs=lambda needs: None
    ) as loaded:
        for number, (request, answer) in enumerate(zip(REQUESTS, found, strict=True)):
            params = GenerationParams(
                temperature=request.get("temperature", 1.0),
                max_new_tokens=request.get("max_new_tokens", 6),
                ignore_eos=request.get("ignore_eos", False),
                seed=5 + number,
                logprobs=request.get("logprobs"),
            )
            (alone,) = loaded.generate([request.get("prompt") or request["tokens"]], params)
            assert answer["tokens"] == list(alone.tokens)
            assert answer["text"] == alone.text
            assert answer["finish_reason"] == alone.finish_reason
            assert answer.get("id") == request.get("id")
            assert ("id" in answer) == ("id" in request)
            assert ("logprobs" in answer) == ("logprobs" in request)
    assert [set(each) for each in found[3]["logprobs"]] == [{"logprob", "top"}] * 6
    assert [len(each["top"]) for each in found[3]["logprobs"]] == [2] * 6
    assert not part_of(unbroken).exists()


def reach_of(model: ModelToLoad) -> Any:
    return model.check([5] * (model.max_length - 1), GenerationParams(), "it")


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_was_cut_anywhere_goes_on_to_the_same_answers(
    seed: int, unbroken: Path, model: ModelToLoad, write: Write, tmp_path: Path, made_up: Opened
) -> None:
    chance = random.Random(seed)
    lines = unbroken.read_bytes().splitlines(keepends=True)
    chance.shuffle(lines)
    whole = b"".join(lines)
    out = tmp_path / "out.jsonl"
    cut = chance.choice([0, len(whole), chance.randrange(len(whole))])
    part_of(out).write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    opened = made_up()
    done = answer_file(model, write(REQUESTS), out, DEFAULTS, batch=2)
    assert done == Answered(answers=20, found=kept, errors=0)
    assert bool(opened) == (kept < 20)  # what is only to be put in order needs no model
    assert answers(out) == answers(unbroken)
    assert not part_of(out).exists()


class Dying(FakeSession):
    """A session whose process dies after some calls."""

    def forward(self, *arguments: Any) -> NDArray[np.float32] | None:
        """See `FakeSession`."""
        if len(self.calls) == 20:
            raise RankError("rank 1 died", rank=1)
        return super().forward(*arguments)


def test_an_engine_that_dies_ends_the_run_and_the_next_one_goes_on(
    unbroken: Path, model: ModelToLoad, write: Write, tmp_path: Path, made_up: Opened
) -> None:
    out = tmp_path / "out.jsonl"
    made_up(kind=Dying)
    with pytest.raises(RankError, match="rank 1 died"):
        answer_file(model, write(REQUESTS), out, DEFAULTS, batch=2)
    assert not out.exists()
    there = part_of(out).read_bytes().count(b"\n")
    assert 0 < there < 20
    assert b"error" not in part_of(out).read_bytes()
    made_up()
    done = answer_file(model, write(REQUESTS), out, DEFAULTS)
    assert done == Answered(answers=20, found=there, errors=0)
    assert answers(out) == answers(unbroken)


def test_a_request_that_fails_has_its_error_and_the_others_their_answers(
    unbroken: Path, model: ModelToLoad, write: Write, tmp_path: Path, made_up: Opened
) -> None:
    bad = model.tokenizer.encode("bad")

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        logits = logits_after(tokens, vocabulary)
        return logits * np.float32("nan") if tokens[: len(bad)] == bad else logits

    made_up(logits_of)
    out = tmp_path / "out.jsonl"
    requests = [*REQUESTS, {"prompt": "bad", "id": 7}]
    done = answer_file(model, write(requests), out, DEFAULTS, batch=4)
    assert done == Answered(answers=21, found=0, errors=1)
    *others, failed = answers(out)
    assert failed["error"]["type"] == "NumericsError"
    assert "logits are NaN" in failed["error"]["message"]
    assert (failed["id"], failed["finish_reason"]) == (7, "error")
    assert [answer["tokens"] for answer in others] == [a["tokens"] for a in answers(unbroken)]
    made_up(kind=Dying)
    assert answer_file(model, write(requests), out, DEFAULTS) == Answered(
        answers=21, found=21, errors=1
    )


def test_answers_that_are_all_there_are_left_as_they_are(
    unbroken: Path, model: ModelToLoad, write: Write, made_up: Opened
) -> None:
    opened = made_up()
    before = unbroken.stat()
    part_of(unbroken).write_bytes(unbroken.read_bytes())  # left by a kill just before its end
    told: list[Needs] = []
    done = answer_file(model, write(REQUESTS), unbroken, DEFAULTS, on_needs=told.append)
    assert done == Answered(answers=20, found=20, errors=0)
    assert told == [Needs()]
    assert (unbroken.stat().st_ino, unbroken.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )
    assert not opened
    assert not part_of(unbroken).exists()
    part_of(unbroken).write_bytes(b"precious")
    answer_file(model, write(REQUESTS), unbroken, DEFAULTS)
    assert part_of(unbroken).read_bytes() == b"precious"


def test_what_is_there_of_something_else_is_replaced_only_when_told_to(
    unbroken: Path, model: ModelToLoad, write: Write, tmp_path: Path, made_up: Opened
) -> None:
    opened = made_up()
    path, other = write(REQUESTS), GenerationParams(max_new_tokens=6)
    content = unbroken.read_bytes()
    shuffled = b"".join(sorted(content.splitlines(keepends=True), reverse=True))
    spoilt = (content[:-9], content + b"\n", content[:9], content[:70], content * 2, shuffled)
    for there in (content, b"precious\n", *spoilt):
        unbroken.write_bytes(there)
        params = other if there == content else DEFAULTS
        with pytest.raises(OutputError, match="--overwrite"):
            answer_file(model, path, unbroken, params)
        assert unbroken.read_bytes() == there
    out = tmp_path / "out.jsonl"
    part_of(out).write_bytes(content)
    with pytest.raises(OutputError, match=r"out.jsonl.part holds .*--overwrite"):
        answer_file(model, path, out, other)
    assert part_of(out).read_bytes() == content
    assert not opened
    for place in (unbroken, out):
        assert answer_file(model, path, place, other, overwrite=True).found == 0
    assert answers(out) == answers(unbroken)
    assert [answer["tokens"] for answer in answers(out)] != [
        json.loads(line)["tokens"] for line in content.splitlines()
    ]


def test_links_between_the_files_lose_neither_answers_nor_requests(
    unbroken: Path, model: ModelToLoad, write: Write, made_up: Opened
) -> None:
    opened = made_up()
    path, part, content = write(REQUESTS), part_of(unbroken), unbroken.read_bytes()
    for link, to in ((part, unbroken), (unbroken, part)):
        if link == unbroken:
            unbroken.rename(part)
        link.symlink_to(to)
        assert answer_file(model, path, unbroken, DEFAULTS).found == 20
        assert unbroken.read_bytes() == content
        link.unlink()
    requests = path.read_bytes()
    for link in (unbroken, part):
        unbroken.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
        link.symlink_to(path)
        with pytest.raises(OutputError, match=f"{link} is the file of requests itself"):
            answer_file(model, path, unbroken, DEFAULTS, overwrite=True)
        assert path.read_bytes() == requests
    assert not opened


def test_an_answer_is_kept_while_its_line_is_as_it_was(
    unbroken: Path, model: ModelToLoad, write: Write, tmp_path: Path, made_up: Opened
) -> None:
    made_up()
    out = tmp_path / "out.jsonl"
    part_of(out).write_bytes(unbroken.read_bytes())
    changed = [*REQUESTS, {"prompt": "more"}]
    changed[6] = {**changed[6], "temperature": 0.5}
    assert answer_file(model, write(changed), out, DEFAULTS).found == 19
    new, old = answers(out), answers(unbroken)
    assert new[:6] + new[7:20] == old[:6] + old[7:]
    assert new[6]["key"] != old[6]["key"]


def test_of_any_number_of_requests_few_are_under_way(
    model: ModelToLoad,
    write: Write,
    tmp_path: Path,
    made_up: Opened,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_up()
    handles: list[Any] = []
    most = 0
    submit = Model.submit

    def counted(self: Model, *arguments: Any, **options: Any) -> Any:
        nonlocal most
        handles.append(submit(self, *arguments, **options))
        most = max(most, sum(not handle.done for handle in handles))
        return handles[-1]

    monkeypatch.setattr(Model, "submit", counted)
    path = write([{"prompt": f"{number}", "max_new_tokens": 2} for number in range(150)])
    answer_file(model, path, tmp_path / "out", DEFAULTS, batch=2)
    assert len(handles) == 150
    assert 2 <= most < 20


def test_no_request_gives_no_answer_and_needs_no_model(
    model: ModelToLoad, write: Write, tmp_path: Path, made_up: Opened
) -> None:
    opened = made_up()
    out = tmp_path / "out"
    nothing = Answered(answers=0, found=0, errors=0)
    for _ in range(2):
        assert answer_file(model, write([]), out, DEFAULTS) == nothing
        assert out.read_bytes() == b""
    assert not opened
    assert not part_of(out).exists()


def test_requests_come_from_standard_input_too(
    unbroken: Path,
    model: ModelToLoad,
    write: Write,
    tmp_path: Path,
    made_up: Opened,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = write(REQUESTS).read_bytes()
    made_up()
    out = tmp_path / "out"
    for found in (0, 20):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert answer_file(model, STDIN, out, DEFAULTS).found == found
        assert answers(out) == answers(unbroken)


def test_what_cannot_be_is_told_before_a_model_is_loaded_and_leaves_nothing(
    model: ModelToLoad, write: Write, tmp_path: Path, made_up: Opened
) -> None:
    opened = made_up()
    path = write(REQUESTS)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for out in (tmp_path / "none" / "out", tmp_path / "file" / "out", tmp_path / "folder"):
        with pytest.raises(OutputError, match=f"cannot write {out}"):
            answer_file(model, path, out, DEFAULTS)
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        answer_file(model, tmp_path / "no.jsonl", tmp_path / "out", DEFAULTS)
    with pytest.raises(RequestError, match="20 lines are wrong"):
        answer_file(model, write([{}] * 20), tmp_path / "out", DEFAULTS)
    assert not opened
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_does_not_load_leaves_nothing(
    model: ModelToLoad, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def broken(*_: Any, **__: Any) -> Any:
        raise BundleError("the engine is of another machine")
        yield

    monkeypatch.setattr("export_grok.runtime.model.open_session", broken)
    told: list[Needs] = []
    with pytest.raises(BundleError, match="of another machine"):
        answer_file(
            model, write(REQUESTS), tmp_path / "out", DEFAULTS, batch=4, on_needs=told.append
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert told[0].memory > 0
