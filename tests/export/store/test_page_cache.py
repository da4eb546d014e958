"""What was copied is written at once, dropped some time later, and never lost."""

import os
from pathlib import Path

import pytest

from export_grok.export.checkpoint import open_weights
from export_grok.export.index_source import IndexSource
from export_grok.export.store import page_cache
from export_grok.export.store.folder import write_store
from export_grok.export.store.page_cache import WrittenPages, let_go
from tests.conftest import DATA


def test_what_is_written_is_sent_in_long_pieces_and_dropped_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(page_cache, "let_go", lambda _file, *place: told.append(place))
    monkeypatch.setattr(page_cache, "SENT_BYTES", 30)
    pages = WrittenPages(3)
    for offset in range(0, 80, 10):
        pages.add(offset, 10)
    assert told == [(0, 30), (30, 30)]
    pages.add(100, 10)  # behind a hole
    pages.add(110, 50)
    assert told[2:] == [(60, 20), (0, 30), (100, 60), (30, 30)]


def test_bytes_that_are_let_go_are_still_there(tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    with (tmp_path / "file").open("w+b") as file:
        file.write(content)
        file.flush()
        for _ in range(3):
            let_go(file.fileno(), 0, len(content))
        file.seek(0)
        assert file.read() == content


def test_a_system_that_cannot_be_told_copies_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, index = open_weights(DATA / "tiny")
    write_store(IndexSource(config, index), tmp_path / "a")
    monkeypatch.delattr(os, "posix_fadvise")
    write_store(IndexSource(config, index), tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
