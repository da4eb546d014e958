"""Answers on the disk: none is lost or taken for another's, wherever the writing ends."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from export_grok.errors import OutputError
from export_grok.runtime.jsonl.keys import Keys
from export_grok.runtime.jsonl.results import BEGINNING, Results

ORDER = (3, 1, 5, 2)
LINES = {number: b"request %d" % number for number in ORDER}


def keys(basis: bytes = b"basis") -> Keys:
    """Return the keys of lines 1, 2, 3 and 5."""
    made = Keys(basis)
    for number in sorted(LINES):
        made.add(number, LINES[number])
    return made


def record(number: int) -> dict[str, Any]:
    return {"line": number, "text": f"é {number}\n", **({"error": "x"} if number == 5 else {})}


def written(path: Path, numbers: Sequence[int] = ORDER) -> bytes:
    """Return the file with the answers to some lines, in that order."""
    results = Results(path, keys())
    results.read()
    with results.opened():
        for number in numbers:
            results.add(record(number))
    return path.read_bytes()


def finish(path: Path, out: Path) -> list[dict[str, Any]]:
    """Answer what is missing, and return all answers as `out` has them."""
    results = Results(path, keys())
    results.read()
    with results.opened():
        for number in ORDER:
            if not results.has(number):
                results.add(record(number))
        assert results.answers == len(ORDER)
        results.write_sorted(out)
    assert not path.exists()
    return [json.loads(line) for line in out.read_bytes().splitlines()]


def test_answers_are_found_by_their_lines_and_written_in_order(tmp_path: Path) -> None:
    path, out = tmp_path / "part", tmp_path / "out"
    content = written(path)
    results = Results(path, keys())
    results.read()
    assert not results.whole  # they are not in order
    assert (results.answers, results.errors, results.others) == (4, 1, 0)
    assert [number for number in range(6) if results.has(number)] == [1, 2, 3, 5]
    found = finish(path, out)
    assert [answer["line"] for answer in found] == [1, 2, 3, 5]
    assert sorted(out.read_bytes().splitlines()) == sorted(content.splitlines())
    for answer in found:
        assert answer.pop("key") == (keys().get(answer["line"]) or b"").hex()
        assert answer == record(answer["line"])
    sorted_ = Results(out, keys())
    sorted_.read()
    assert sorted_.whole


def test_wherever_the_file_is_cut_the_whole_lines_before_are_kept(tmp_path: Path) -> None:
    content = written(tmp_path / "whole")
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    path = tmp_path / "part"
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        results = Results(path, keys())
        results.read()
        kept = sum(end <= cut for end in ends)
        assert (results.answers, results.others) == (kept, 0)
        assert [number for number in ORDER if results.has(number)] == list(ORDER[:kept])
        assert not results.whole
        if cut % 7 == 0:
            assert len(finish(path, tmp_path / "out")) == 4


@pytest.mark.parametrize("zeroed", [slice(0, 40), slice(100, 140), slice(-30, None)])
def test_a_line_that_a_loss_of_power_spoilt_is_no_answer(tmp_path: Path, zeroed: slice) -> None:
    path = tmp_path / "part"
    content = bytearray(written(path))
    content[zeroed] = bytes(len(content[zeroed]))
    path.write_bytes(content)
    results = Results(path, keys())
    results.read()
    assert results.answers < 4
    assert len(finish(path, tmp_path / "out")) == 4


def test_answers_to_other_requests_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "part"
    content = written(path)
    other = Results(path, keys(b"other options"))
    other.read()
    assert (other.answers, other.others) == (0, 4)
    moved = json.loads(content.splitlines()[0]) | {"line": 2}
    path.write_text(json.dumps(moved) + "\n" + '{"line": true}\n{"line": 9, "key": 5}\n')
    results = Results(path, keys())
    results.read()
    assert (results.answers, results.others) == (0, 3)


def test_a_line_in_another_encoding_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "part"
    first, second, *_ = written(path).splitlines()
    path.write_bytes(first + b"\n" + second.decode().encode("utf-16-be") + b"\n")
    results = Results(path, keys())
    results.read()
    assert (results.answers, results.others) == (1, 1)


def test_of_two_answers_to_one_line_the_last_one_counts(tmp_path: Path) -> None:
    path, out = tmp_path / "part", tmp_path / "out"
    written(path, (1, 2))
    results = Results(path, keys())
    results.read()
    with results.opened():
        results.add({"line": 2, "text": "later"})
        assert results.answers == 2
        results.write_sorted(out)
    assert [json.loads(line)["text"] for line in out.read_bytes().splitlines()] == [
        "é 1\n",
        "later",
    ]


def test_a_file_of_something_else_is_seen_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # nobody reads this to its end
    results = Results(path, keys())
    results.read()
    assert (results.answers, results.others, results.whole) == (0, 1, False)


def test_nobody_else_writes_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "part"
    written(path, (1,))
    ours, theirs = Results(path, keys()), Results(path, keys())
    ours.read()
    theirs.read()
    with ours.opened():
        with pytest.raises(OutputError, match="another run is writing"):
            theirs.read()
        with pytest.raises(OutputError, match="another run is writing"), theirs.opened():
            pass
        ours.add(record(2))
    with pytest.raises(OutputError, match="has changed since it was read"), theirs.opened():
        pass
    assert path.read_bytes().count(b"\n") == 2


def test_a_file_without_an_answer_does_not_stay(tmp_path: Path) -> None:
    assert written(tmp_path / "part", (1,))
    results = Results(tmp_path / "other", keys())
    results.read()
    with results.opened():
        assert results.path.exists()
    assert not results.path.exists()


def test_a_full_disk_is_told_and_what_is_there_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "part"
    content = written(path, (1, 2))
    results = Results(path, keys())
    results.read()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OutputError, match="No space left"), results.opened():
            results.add(record(3))
    assert path.read_bytes().startswith(content)
    assert len(finish(path, tmp_path / "out")) == 4


def test_every_line_begins_as_a_file_of_answers_is_known_by(tmp_path: Path) -> None:
    for line in written(tmp_path / "part").splitlines():
        assert line.startswith(BEGINNING)
