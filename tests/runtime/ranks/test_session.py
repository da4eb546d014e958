"""Ranks compute what one process does, and none of them outlives a mishap of another."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.errors import BundleError, RankError, RequestError
from export_grok.runtime.decode import decode
from export_grok.runtime.ranks.memory import GroupSizes, RankMemory, shared_file
from export_grok.runtime.ranks.session import RankedSession
from export_grok.runtime.ranks.watch import Patience
from export_grok.runtime.request import Request
from tests.runtime.ranks.conftest import CONFIG, BundleFor
from tests.runtime.ranks.toy import expected

TOY = "tests.runtime.ranks.toy:open_toy"
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 12))
WIDTH = CONFIG.emb_size


def session_of(
    bundle: Bundle, ranks: int, *, batch: int = 2, length: int = 32, **patience: float
) -> RankedSession:
    return RankedSession(
        bundle,
        ranks=ranks,
        batch=batch,
        max_length=length,
        threads=1,
        opener=TOY,
        patience=Patience(**patience),
    )


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what plants a fault in the toy."""
    return lambda **fault: monkeypatch.setenv("TOY", json.dumps(fault))


def run(session: RankedSession, steps: int = 4) -> NDArray[np.float32]:
    """Prefill, then decode; return the logits of the steps [steps, B, V]."""
    found = [session.forward(TOKENS[:, :6], np.zeros(2, np.int64), np.full(2, 5))]
    for step in range(steps):
        place = min(6 + step, session.max_length - 1)
        token = TOKENS[:, [min(6 + step, 11)]]
        found.append(session.forward(token, np.full(2, place), np.zeros(2, np.int64)))
    return np.stack([logits for logits in found if logits is not None])


def same(found: NDArray[np.float32] | None, wanted: NDArray[np.float32]) -> bool:
    return found is not None and np.array_equal(found, wanted)


# What they compute.


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_give_the_logits_of_one_process(
    bundle_for: BundleFor, started: list[int], ranks: int
) -> None:
    whole = expected(CONFIG, TOKENS)
    with session_of(bundle_for(ranks), ranks) as session:
        assert np.array_equal(run(session), whole[:, 5:10].swapaxes(0, 1))
        start = np.zeros(2, np.int64)
        assert session.forward(TOKENS[:, :4], start, None) is None
        assert np.array_equal(session.forward_all(TOKENS[:, 4:], start + 4), whole[:, 4:])
    assert len(started) == ranks


def test_rows_that_are_named_are_the_only_ones_that_ranks_compute(
    bundle_for: BundleFor, started: list[int]
) -> None:
    tokens = np.resize(TOKENS, (3, 12))
    whole = expected(CONFIG, tokens)
    with session_of(bundle_for(2), 2, batch=3) as session:
        assert session.prefill_rows == 1  # as the ranks say
        session.forward(tokens[:, :4], np.zeros(3, np.int64), None)
        chosen, start = np.array([2, 0]), np.array([4, 3])
        new = np.stack([tokens[2, 4:7], tokens[0, 3:6]])
        found = session.forward(new, start, np.array([2, 1]), chosen)
        assert same(found, np.stack([whole[2, 6], whole[0, 4]]))
        row = np.array([1])
        found = session.forward(tokens[[1], 4:5], np.array([4]), np.array([0]), row)
        assert same(found, whole[[1], 4])


def test_a_copied_row_goes_on_as_the_one_it_was_copied_from(
    bundle_for: BundleFor, started: list[int]
) -> None:
    whole = expected(CONFIG, TOKENS[:1])
    with session_of(bundle_for(2), 2) as session:
        session.forward(TOKENS[:, :8], np.zeros(2, np.int64), None)
        session.copy(0, 1, 5)
        found = session.forward(TOKENS[:1, 5:], np.array([5]), np.array([6]), np.array([1]))
        assert same(found, whole[:, -1])


def test_rows_of_different_length_decode_alike_by_any_number_of_ranks(
    bundle_for: BundleFor, started: list[int]
) -> None:
    requests = [
        Request(prompt=tuple(TOKENS[row, :length].tolist()), max_new_tokens=8)
        for row, length in enumerate((3, 9))
    ]
    steps = []
    for ranks in (1, 2):
        with session_of(bundle_for(ranks), ranks) as session:
            steps.append(list(decode(session, requests, chunk=4)))
    assert steps[0] == steps[1]


def test_a_sum_is_added_in_the_order_of_ranks_in_float32() -> None:
    sizes = GroupSizes(ranks=4, batch=1, max_length=2, width=3, vocabulary=8)
    descriptor = shared_file(sizes)
    memory = RankMemory(descriptor, sizes)
    os.close(descriptor)
    for rank, value in enumerate((1.0, 1e8, -1e8, 0.5)):
        memory.part(rank, (1, 2, 3))[:] = value
    memory.add((1, 2, 3))
    assert (memory.total((1, 2, 3)) == 0.5).all()  # the 1 is lost in 1e8, and stays lost


def test_parts_of_the_memory_do_not_overlap() -> None:
    sizes = GroupSizes(ranks=3, batch=2, max_length=5, width=7, vocabulary=6)
    descriptor = shared_file(sizes)
    memory, other = RankMemory(descriptor, sizes), RankMemory(descriptor, sizes)
    os.close(descriptor)
    lengths = (*[sizes.stream] * 3, *[sizes.logits] * 3)
    arrays = [
        [one.part(rank, (sizes.stream,)) for rank in range(3)]
        + [one.logits(rank, (sizes.logits,)) for rank in range(3)]
        + [one.total((sizes.stream,))]
        for one in (memory, other)
    ]
    memory.tokens((2, 5))[:] = -1
    for number, array in enumerate(arrays[0]):
        array[:] = number
    assert [array.size for array in arrays[1]] == [*lengths, sizes.stream]
    assert all((array == number).all() for number, array in enumerate(arrays[1]))
    assert (other.tokens((2, 5)) == -1).all()


def test_what_does_not_fit_is_refused_and_the_ranks_go_on(
    bundle_for: BundleFor, started: list[int]
) -> None:
    with session_of(bundle_for(2), 2) as session:
        for tokens, last in (
            (TOKENS + 24, None),
            (np.zeros((2, 33), np.int64), None),
            (TOKENS, 12),
        ):
            with pytest.raises(RequestError):
                session.forward(
                    tokens, np.zeros(2, np.int64), None if last is None else np.full(2, last)
                )
        token, one = TOKENS[:1, :1], np.zeros(1, np.int64)
        for rows in ([2], [-1], [0, 0], []):
            with pytest.raises(RequestError, match=r"rows is \[.*0 to 1, each once"):
                session.forward(token, one, None, np.array(rows, np.int64))
        with pytest.raises(RequestError, match=r"1 of its rows take \[1, 1 or more\]"):
            session.forward(TOKENS[:, :1], one, None, np.array([1]))
        for source, target, length in ((0, 0, 1), (0, 2, 1), (-1, 0, 1), (0, 1, 0), (0, 1, 33)):
            with pytest.raises(RequestError, match="cannot be copied"):
                session.copy(source, target, length)
        assert len(run(session)) == 5


def test_what_rank_0_has_comes_to_all_at_their_start_and_later(
    bundle_for: BundleFor, started: list[int], planted: Any
) -> None:
    planted(share=True)
    with session_of(bundle_for(4), 4) as session:
        run(session)


def test_what_a_rank_prints_neither_stops_it_nor_is_seen(
    bundle_for: BundleFor, started: list[int], planted: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    planted(rank=1, step=2, at="layer 1, experts", do="chatter")
    with session_of(bundle_for(2), 2) as session:
        assert len(run(session)) == 5
    assert capfd.readouterr() == ("", "")


# What goes wrong with one.


def test_a_rank_that_cannot_open_its_part_is_the_error_it_met(
    bundle_for: BundleFor, started: list[int], planted: Any
) -> None:
    planted(step=0, at="start", do="refuse")  # all of them
    with pytest.raises(BundleError, match=r"^rank [01]: the planted bundle is damaged$"):
        session_of(bundle_for(2), 2)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"do": "raise"}, r"failed \(ValueError: planted\)"),
        ({"do": "exit"}, r"exit code 3.*Its last words: .*planted last words\."),
        ({"do": "kill"}, "SIGKILL"),
        ({"do": "babble"}, "no message"),
        ({"do": "change", "to": {"where": "layer 1, router"}}, r"rank \d.* layer 1, router"),
        ({"do": "change", "to": {"shape": [2, 1, 8]}}, r"\[2, 1, 8\]"),
        ({"do": "change", "to": {"where": 5}}, "unexpected message"),
    ],
)
def test_the_error_names_rank_place_and_step_and_what_it_last_did(
    bundle_for: BundleFor, started: list[int], planted: Any, fault: dict[str, Any], told: str
) -> None:
    planted(rank=1, step=3, at="layer 1, experts", **fault)
    session = session_of(bundle_for(2), 2)
    with pytest.raises(RankError, match=told) as caught:
        run(session)
    text = str(caught.value)
    assert "\n" not in text
    assert "in decode (step 3)" in text
    assert "it had the sum of layer 1, attention" in text
    if fault["do"] != "change":
        assert caught.value.rank == 1
        assert text.startswith("rank 1 of 2 ")
    with pytest.raises(RequestError, match="ended"):
        run(session)


def test_a_rank_that_fails_in_a_copy_is_named_as_in_any_step(
    bundle_for: BundleFor, started: list[int], planted: Any
) -> None:
    planted(rank=1, step=2, at="copy", do="raise")
    session = session_of(bundle_for(2), 2)
    session.forward(TOKENS[:, :6], np.zeros(2, np.int64), None)
    with pytest.raises(RankError, match=r"^rank 1 of 2 failed .*planted\), in copy \(step 2\)"):
        session.copy(0, 1, 6)
    with pytest.raises(RequestError, match="ended"):
        session.copy(0, 1, 6)


def test_logits_of_another_shape_are_refused(
    bundle_for: BundleFor, started: list[int], planted: Any
) -> None:
    planted(step=1, at="logits", do="change", to={"short": True})
    session = session_of(bundle_for(2), 2)
    with pytest.raises(RankError, match=r"gives logits \[2, 11\].*gives logits \[2, 12\]"):
        run(session)


@pytest.mark.parametrize(("do", "told"), [("stop", "stalled .a signal"), ("sleep", "stalled: ")])
def test_a_rank_that_does_nothing_has_stalled(
    bundle_for: BundleFor, started: list[int], planted: Any, do: str, told: str
) -> None:
    planted(rank=1, step=2, at="layer 0, experts", do=do)
    session = session_of(bundle_for(2), 2, stall=2)
    with pytest.raises(RankError, match=f"^rank 1 of 2 {told}.* to the sum of layer 0, experts"):
        run(session)


def test_a_rank_that_computes_for_ever_misses_its_deadline(
    bundle_for: BundleFor, started: list[int], planted: Any
) -> None:
    planted(rank=0, step=1, at="layer 0, attention", do="spin")
    session = session_of(bundle_for(2), 2, stall=2, deadline=4)
    with pytest.raises(RankError, match=r"^rank 0 of 2 did not come in 4 s.*prefill \(step 1"):
        run(session)


def test_a_rank_that_stalls_at_its_start_is_named(
    bundle_for: BundleFor, started: list[int], planted: Any
) -> None:
    planted(rank=1, step=0, at="start", do="sleep")
    with pytest.raises(RankError, match=r"^rank 1 of 2 stalled.*at its start"):
        session_of(bundle_for(2), 2, stall=2)


# Killed at any moment.


@contextmanager
def killed_after(seconds: float, pids: list[int], rank: int) -> Iterator[list[float]]:
    """Kill a rank so long after its start, or after now; yield when that was."""
    moment: list[float] = []

    def kill() -> None:
        while len(pids) <= rank:
            time.sleep(0.001)
        time.sleep(seconds)
        with suppress(ProcessLookupError):  # it may have ended before
            os.kill(pids[rank], signal.SIGKILL)
        moment.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield moment
    finally:
        thread.join()


@pytest.mark.parametrize("moment", range(20))
def test_killed_at_any_moment_a_rank_is_named_and_all_end(
    bundle_for: BundleFor, started: list[int], planted: Any, moment: int
) -> None:
    planted(pause=0.002)  # so that a step takes a while
    chance = random.Random(moment)
    ranks, rank = 4, chance.randrange(4)
    phase = ("start", "prefill", "decode", "shutdown")[moment % 4]
    if phase == "start":
        delay = chance.uniform(0, 0.15)
        with killed_after(delay, started, rank) as when, pytest.raises(RankError) as caught:
            run(session_of(bundle_for(ranks), ranks), steps=10_000)
    elif phase == "shutdown":
        session = session_of(bundle_for(ranks), ranks)
        run(session, steps=1)
        with killed_after(chance.uniform(0, 0.002), started, rank):
            session.close()
        return
    else:
        session = session_of(bundle_for(ranks), ranks)
        if phase == "decode":
            run(session, steps=1)
        delay = chance.uniform(0, 0.012 if phase == "prefill" else 0.1)
        with killed_after(delay, started, rank) as when, pytest.raises(RankError) as caught:
            run(session, steps=10_000)
    assert time.monotonic() - when[0] < 10
    assert caught.value.rank == rank
    assert "SIGKILL" in str(caught.value)


def test_closed_twice_it_is_closed(bundle_for: BundleFor, started: list[int]) -> None:
    session = session_of(bundle_for(2), 2)
    session.close()
    session.close()
    with pytest.raises(RequestError):
        run(session)


def test_a_session_that_is_dropped_ends_its_ranks(
    bundle_for: BundleFor, started: list[int]
) -> None:
    session = session_of(bundle_for(2), 2)
    assert len(run(session)) == 5
    del session
