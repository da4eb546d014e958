"""Each row of a session has a life of its own: whatever is done to others, it keeps what it holds.

On the fake device of test_session.py: it proves addresses, places and what is kept, and nothing of
CUDA or TensorRT.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import Dtype
from export_grok.engines.backend import RowSession
from export_grok.engines.trt.cache import RowCache
from export_grok.engines.trt.record import Sizes
from export_grok.engines.trt.tensors import CACHES, ELEMENTS
from export_grok.errors import ConfigError, RequestError
from tests.conftest import load_golden
from tests.engines.trt.fake_session import TOLERANCE, Floats, Ints, Opened, at, ints, open_fake

NAME = "tiny8"
VOCABULARY = load_golden(NAME).config.vocab_size

OpenedOf = Callable[..., Opened]


@pytest.fixture
def opened(tmp_path: Path) -> OpenedOf:
    """Return the way to a session on a fake device."""
    return functools.partial(open_fake, tmp_path / "bundle", NAME)


def cache_of(run: Opened, dtype: Dtype = "float32") -> NDArray[np.generic]:
    """Return a copy of all that the caches hold, [layers, k or v, B, Hkv, T, D]."""
    config, kind = load_golden(NAME).config, ELEMENTS[dtype]
    shape = (run.session.batch, config.num_kv_heads, run.sizes.slots, config.key_size)
    nbytes = int(np.prod(shape)) * kind.itemsize
    layers = run.session._cache.layers
    return np.stack(
        [
            [run.device.at(layer[name], nbytes).view(kind).reshape(shape) for name in CACHES]
            for layer in layers
        ]
    )


@dataclass
class Rows:
    """A session, and what each of its rows must hold.

    `forward` and `copy` do to the session what their arguments say, and hold it to the laws.
    """

    run: Opened
    alone: RowSession
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = {row: [] for row in range(self.run.session.batch)}

    def forward(self, new: dict[int, list[int]], starts: dict[int, int], last: int) -> None:
        """Bring rows new tokens of one width, in the order of `new`; `last` -1 asks for none."""
        before = cache_of(self.run)
        rows = list(new)
        logits = self.run.session.forward(
            ints([new[row] for row in rows]),
            ints([starts[row] for row in rows]),
            None if last < 0 else at(len(rows), last),
            ints(rows),
        )
        kept = {row: starts.get(row, len(held)) for row, held in self.tokens.items()}
        self.check_kept(before, kept)
        for row in rows:
            self.tokens[row] = self.tokens[row][: starts[row]] + new[row]
        assert (logits is None) == (last < 0)
        for place, row in enumerate(rows if logits is not None else ()):
            assert logits is not None
            assert logits.shape == (len(rows), VOCABULARY)
            wanted = self.wanted(self.tokens[row][: starts[row] + last + 1])
            assert np.abs(logits[place] - wanted).max() < TOLERANCE

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy, and look for the same bits."""
        before = cache_of(self.run)
        self.run.session.copy(source, target, length)
        expected = before.copy()
        expected[:, :, target, :, :length] = before[:, :, source, :, :length]
        np.testing.assert_array_equal(cache_of(self.run), expected)
        self.tokens[target] = self.tokens[source][:length]

    def wanted(self, tokens: list[int]) -> Floats:
        """Return the logits of the last token, computed with nothing beside."""
        logits = self.alone.forward(ints([tokens]), at(1, 0), at(1, len(tokens) - 1))
        assert logits is not None
        found: Floats = logits[0]
        return found

    def check_kept(self, before: NDArray[np.generic], kept: dict[int, int]) -> None:
        """Hold the first tokens of each row to the bits that they had before."""
        after = cache_of(self.run)
        for row, end in kept.items():
            np.testing.assert_array_equal(after[:, :, row, :, :end], before[:, :, row, :, :end])


def rows_of(folder: Path) -> Rows:
    run = open_fake(folder, NAME, batch=3, chunk=4, max_length=20)
    return Rows(run=run, alone=open_fake(folder, NAME, batch=1, chunk=20, max_length=20).session)


def some_tokens(random: np.random.Generator, count: int, width: int) -> list[list[int]]:
    found: list[list[int]] = random.integers(VOCABULARY, size=(count, width)).tolist()
    return found


def forward_some(random: np.random.Generator, rows: Rows) -> None:
    """Bring some rows tokens, in any order: mostly one that continues what they hold."""
    batch, longest = rows.run.session.batch, rows.run.session.max_length
    named = random.permutation(batch)[: random.integers(1, batch + 1)].tolist()
    back = int(random.choice([0, 0, 0, 1, 5]))
    starts = {row: max(0, min(len(rows.tokens[row]), longest - 1) - back) for row in named}
    room = longest - max(starts.values())
    width = min(int(random.choice([1, 1, 1, 3, 9, longest])), room)
    new = dict(zip(named, some_tokens(random, len(named), width), strict=True))
    rows.forward(new, starts, int(random.integers(-1, width)))


def copy_some(random: np.random.Generator, rows: Rows) -> None:
    """Copy the first tokens of a row to another."""
    source, target = random.permutation(rows.run.session.batch)[:2].tolist()
    if rows.tokens[source]:
        rows.copy(source, target, int(random.integers(1, len(rows.tokens[source]) + 1)))


@pytest.mark.parametrize("seed", range(3))
def test_rows_get_the_logits_that_they_get_alone_and_the_others_keep_what_they_hold(
    tmp_path: Path, seed: int
) -> None:
    random, rows = np.random.default_rng(seed), rows_of(tmp_path)
    for _ in range(30):
        (copy_some if random.random() < 0.3 else forward_some)(random, rows)


def test_a_full_row_is_parked_in_the_very_last_slot_if_there_is_but_one(opened: OpenedOf) -> None:
    run = opened(chunk=2, max_length=127)
    assert run.sizes.slots == 128
    tokens = np.random.default_rng(3).integers(VOCABULARY, size=(1, 127))
    full = run.session.forward(tokens, at(1, 0), at(1, 126), ints([1]))
    before = cache_of(run)
    for place in range(3):
        run.session.forward(ints([[place]]), at(1, place), at(1, 0), ints([0]))
    after = cache_of(run)
    np.testing.assert_array_equal(after[:, :, 1, :, :127], before[:, :, 1, :, :127])
    assert (after[:, :, 1, :, 127] != before[:, :, 1, :, 127]).any()  # there it was
    again = run.session.forward(tokens[:, -1:], at(1, 126), at(1, 0), ints([1]))
    assert full is not None
    assert again is not None
    assert np.abs(full - again).max() < TOLERANCE


def test_several_rows_without_a_slot_to_spare_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunk of 2 or more"):
        Sizes(batch=2, chunk=1, max_length=256)
    for batch, chunk, max_length in ((1, 1, 256), (2, 2, 256), (2, 1, 255), (2, 1, 257)):
        sizes = Sizes(batch=batch, chunk=chunk, max_length=max_length)
        assert batch == 1 or sizes.slots > max_length


def test_a_row_is_parked_no_further_than_it_holds_tokens(opened: OpenedOf) -> None:
    """So it costs least."""
    run = opened(batch=3)

    def places() -> list[int]:
        run.session.forward(ints([[7]]), at(1, 0), at(1, 0), ints([1]))
        runs = run.device.runs
        step = next(row for row in runs if (row.kind, row.phase) == ("layer", "decode"))
        found: list[int] = run.device.at(step.addresses["start"], 24).view(np.int64).tolist()
        return found

    assert places() == [0, 0, 0]
    run.session.forward_all(ints([[7, 8]] * 3), at(3, 4))
    assert places() == [6, 0, 6]
    run.session.forward(ints([[7, 8]]), at(1, 1), None, ints([2]))  # it goes back
    assert places() == [6, 0, 3]
    run.session.copy(0, 2, 5)
    assert places() == [6, 0, 5]


def test_steps_of_any_rows_are_one_graph(opened: OpenedOf) -> None:
    run = opened(batch=3)
    run.device.log.clear()
    for place, rows in enumerate(([2], [0, 1], None, [1, 2, 0])):
        count = 3 if rows is None else len(rows)
        named = None if rows is None else ints(rows)
        run.session.forward(ints([[5]] * count), at(count, place), at(count, 0), named)
    assert run.device.log.count("capture") == 1
    assert run.device.log.count("launch") == 3


def test_a_session_asks_for_one_row_of_a_prompt_at_a_time(opened: OpenedOf) -> None:
    """A plan for a chunk is of one row: more rows take as long one by one."""
    session = opened(batch=3).session
    assert session.prefill_rows == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_is_one_call_a_cache_and_of_the_first_tokens_of_every_head(
    opened: OpenedOf, dtype: Dtype
) -> None:
    run = opened(batch=3, dtype=dtype)
    config = load_golden(NAME).config
    run.session.forward(np.arange(60).reshape(3, 20), at(3, 0), None)
    before = cache_of(run, dtype)
    run.device.log.clear()
    run.session.copy(2, 0, 13)
    assert run.device.log == ["copy"] * 2 * config.num_layers
    after, expected = cache_of(run, dtype), before.copy()
    expected[:, :, 0, :, :13] = before[:, :, 2, :, :13]
    assert after.tobytes() == expected.tobytes()
    assert after.tobytes() != before.tobytes()


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [([0, 0], "each once"), ([0, 3], "0 to 2"), ([-1, 0], "0 to 2"), ([], "one or more")],
)
def test_rows_that_are_none_of_the_sessions_are_refused_before_anything_is_written(
    opened: OpenedOf, rows: list[int], wanted: str
) -> None:
    run = opened(batch=3)
    run.device.log.clear()
    with pytest.raises(RequestError, match=wanted):
        run.session.forward(ints([[1], [2]]), at(2, 0), at(2, 0), ints(rows))
    assert run.device.log == []


@pytest.mark.parametrize(
    ("source", "target", "length"), [(0, 0, 5), (0, 3, 5), (-1, 0, 5), (0, 1, 0), (0, 1, 49)]
)
def test_a_copy_of_what_is_not_there_is_refused(
    opened: OpenedOf, source: int, target: int, length: int
) -> None:
    run = opened(batch=3, max_length=48)
    run.device.log.clear()
    with pytest.raises(RequestError):
        run.session.copy(source, target, length)
    assert run.device.log == []


# ---- planted mistakes: the laws above must see them


Parked = tuple[Ints, Ints]


def parked_at_the_last_token(cache: RowCache, rows: Ints, tokens: Ints, start: Ints) -> Parked:
    every, places = RIGHT(cache, rows, tokens, start)
    others = np.setdiff1d(np.arange(len(places)), rows)
    places[others] = np.maximum(places[others] - 1, 0)
    return every, places


def parked_at_the_start(cache: RowCache, rows: Ints, tokens: Ints, start: Ints) -> Parked:
    every, places = RIGHT(cache, rows, tokens, start)
    places[np.setdiff1d(np.arange(len(places)), rows)] = 0
    return every, places


def in_another_order(cache: RowCache, rows: Ints, tokens: Ints, start: Ints) -> Parked:
    every, places = RIGHT(cache, np.sort(rows), tokens, start)
    return every, places


RIGHT = RowCache.parked


@pytest.mark.parametrize(
    "wrong", [parked_at_the_last_token, parked_at_the_start, in_another_order]
)
def test_a_row_that_is_parked_where_it_does_harm_is_seen(
    wrong: Callable[..., Parked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(tmp_path)
    rows.forward({2: [9, 8, 7], 0: [4, 5, 6]}, {2: 0, 0: 0}, 2)
    monkeypatch.setattr(RowCache, "parked", wrong)
    with pytest.raises(AssertionError):
        rows.forward({2: [11], 1: [12]}, {2: 3, 1: 0}, 0)
