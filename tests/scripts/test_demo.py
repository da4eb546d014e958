"""What step 7 of the first hour compares shows a row that is not kept, and a copy of nothing."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.engines.trt.cache import RowCache
from scripts.gpu.demo import BATCH, BOUND, CHUNK, LENGTH, logits_of_rows
from tests.engines.trt.fake_session import open_fake

RIGHT = RowCache.parked


def logits(folder: Path, chunk: int = CHUNK) -> NDArray[np.float32]:
    session = open_fake(folder, "tiny", batch=BATCH, chunk=chunk, max_length=LENGTH).session
    return logits_of_rows(session, np.random.default_rng(7))


def far(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    return bool(np.abs(found - wanted).max() > BOUND * wanted.std())


def no_copy(cache: RowCache, source: int, target: int, length: int) -> None:
    pass


def parked_at_the_start(
    cache: RowCache, rows: NDArray[np.int64], tokens: NDArray[np.int64], start: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    every, places = RIGHT(cache, rows, tokens, start)
    others = np.setdiff1d(np.arange(len(places)), rows)
    places[others] = 0
    return every, places


def test_logits_of_rows_are_near_where_rows_and_copies_are_right(tmp_path: Path) -> None:
    assert not far(logits(tmp_path, chunk=11), logits(tmp_path))


@pytest.mark.parametrize(("name", "wrong"), [("copy", no_copy), ("parked", parked_at_the_start)])
def test_logits_of_rows_are_far_where_they_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: object
) -> None:
    wanted = logits(tmp_path)
    monkeypatch.setattr(RowCache, name, wrong)
    assert far(logits(tmp_path), wanted)
