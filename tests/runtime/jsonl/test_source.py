"""Lines are read as often as need be, from a file or from standard input."""

import io
import os
import sys
from pathlib import Path

import pytest

from export_grok.errors import OutputError, RequestError
from export_grok.runtime.jsonl import source as module
from export_grok.runtime.jsonl.source import open_source
from export_grok.runtime.prompt_file import STDIN

CONTENT = b"one\r\n\n  two \n \t\nthree"
LINES = [(1, b"one"), (3, b"two"), (5, b"three")]


def test_lines_come_with_their_numbers_each_time(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(CONTENT)
    with open_source(path, tmp_path) as source:
        assert (source.name, source.nbytes) == (str(path), len(CONTENT))
        assert list(source) == LINES
        assert list(source) == LINES


def test_standard_input_is_copied_and_the_copy_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CONTENT)))
    with open_source(STDIN, tmp_path) as source:
        assert (source.name, source.nbytes) == ("stdin", len(CONTENT))
        assert list(source) == list(source) == LINES
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError, match="no/where"), open_source(STDIN, tmp_path / "no/where"):
        pass


def test_a_line_without_an_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 20)
    path = tmp_path / "in"
    path.write_bytes(b"x\n" + b"y" * (1 << 20))
    with open_source(path, tmp_path) as source:
        assert len(list(source)) == 2
    path.write_bytes(b"x\n" + b"y" * (1 << 21))
    with (
        open_source(path, tmp_path) as source,
        pytest.raises(RequestError, match="line 2 is longer than 1 MB"),
    ):
        list(source)


def test_what_is_no_file_is_refused_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("none", "No such file"),
        ("pipe", "no regular"),
        (".", "directory|regular"),
    ):
        with (
            pytest.raises(RequestError, match=f"cannot be read: .*{said}"),
            open_source(tmp_path / name, tmp_path),
        ):
            pass
