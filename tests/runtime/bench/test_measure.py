"""A benchmark: what is done in which order, and the figures that follow from planted samples."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.errors import RequestError
from export_grok.runtime.bench import rounds as bench_rounds
from export_grok.runtime.bench.ceiling import Reading
from export_grok.runtime.bench.options import BenchOptions, cache_length, settings_of
from export_grok.runtime.bench.result import Measurement, Sample, Spread
from export_grok.runtime.bench.rounds import Rounds
from export_grok.runtime.bench.traffic import Traffic
from tests.runtime.fake_session import FakeSession
from tests.runtime.small_model import SMALL

CONFIG = dataclasses.replace(SMALL, sequence_len=40)
OPTIONS = BenchOptions(
    prompt_tokens=(5, 9), context=(3, 7), batch=(1, 2), rounds=3, decode_tokens=4
)
READ = "ceiling"


class LoggedSession(FakeSession):
    """A fake that writes down its calls, and makes the clock go on by what each `took`."""

    log: list[Any]
    took: Callable[[int, int, int], float]

    def forward(self, tokens: Any, start: Any, last: Any, rows: Any = None) -> Any:
        self.log.append((self.batch, int(start[0]), tokens.tolist(), last is not None))
        Clock.now += self.took(self.batch, int(start[0]), tokens.shape[1])
        return super().forward(tokens, start, last, rows)


class Clock:
    """The time that the module under test sees; processors are busy half of it."""

    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant the clock."""
    Clock.now = 0.0
    monkeypatch.setattr(bench_rounds, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(bench_rounds, "process_time", lambda: Clock.now / 2)


def no_time(batch: int, start: int, width: int) -> float:
    return 0.0


def sessions_for(
    options: BenchOptions, log: list[Any], took: Callable[[int, int, int], float] = no_time
) -> dict[int, LoggedSession]:
    length = cache_length(options, settings_of(options, CONFIG))
    sessions = {}
    for batch in options.batch:
        sessions[batch] = LoggedSession(CONFIG, batch=batch, max_length=length)
        sessions[batch].log, sessions[batch].took = log, took
    return sessions


def reader(log: list[Any], rates: Sequence[int] = (10,)) -> Callable[[], Reading]:
    def read() -> Reading:
        log.append(READ)
        number = log.count(READ) - 1
        return Reading(bytes=rates[number % len(rates)], seconds=1.0, cpu_seconds=2.0)

    return read


def run(options: BenchOptions, **more: Any) -> tuple[list[Any], list[Any], list[list[Sample]]]:
    """Return the log of the rounds, the readings, and the samples."""
    log: list[Any] = []
    took = more.pop("took", no_time)
    rounds = Rounds(sessions_for(options, log, took), settings_of(options, CONFIG), options)
    rounds.warm_up()
    log.clear()
    readings, samples = rounds.run(options.rounds, reader(log, **more))
    return log, readings, samples


def parts(log: Sequence[Any]) -> list[list[Any]]:
    """Return the calls between the readings of the ceiling."""
    found: list[list[Any]] = [[]]
    for entry in log:
        if entry == READ:
            found.append([])
        else:
            found[-1].append(entry)
    assert found[0] == found[-1] == []
    return found[1:-1]


# What is done, and in which order.


def test_settings_alternate_and_the_ceiling_is_measured_between_them() -> None:
    log, readings, samples = run(OPTIONS)
    settings = settings_of(OPTIONS, CONFIG)
    work = parts(log)
    assert len(readings) == OPTIONS.rounds * len(settings) + 1
    assert len(work) == OPTIONS.rounds * len(settings)
    assert [len(of_setting) for of_setting in samples] == [OPTIONS.rounds] * len(settings)
    one_round = work[: len(settings)]
    assert work == one_round * OPTIONS.rounds
    assert [calls[-1][0] for calls in one_round] == [setting.batch for setting in settings]
    assert all(
        first != second for first in one_round for second in one_round if first is not second
    )


def test_a_decode_is_steps_of_one_token_behind_its_context_with_the_head() -> None:
    log, _, samples = run(OPTIONS)
    settings = settings_of(OPTIONS, CONFIG)
    for number, setting in enumerate(settings):
        if setting.stage == "prefill":
            continue
        calls = parts(log)[number]
        starts = [start for _, start, _, _ in calls]
        # One step comes before the others, and is not timed.
        context = setting.tokens
        assert starts == [context, *range(context, context + OPTIONS.decode_tokens)]
        assert {(batch, head) for batch, _, _, head in calls} == {(setting.batch, True)}
        assert {np.shape(tokens) for _, _, tokens, _ in calls} == {(setting.batch, 1)}
        assert {len(sample.seconds) for sample in samples[number]} == {OPTIONS.decode_tokens}


def test_a_prefill_is_all_tokens_of_the_prompt_and_the_head_of_the_last() -> None:
    options = BenchOptions(prompt_tokens=(30,), context=(3,), decode_tokens=1)
    log, _, _ = run(options)
    prefill = parts(log)[0]
    assert [start for _, start, _, _ in prefill] == [0]
    assert [len(row) for _, _, tokens, _ in prefill for row in tokens] == [30]
    assert prefill[-1][3]


def test_every_round_reads_the_same_tokens_and_another_seed_others() -> None:
    log, _, _ = run(OPTIONS)
    other, _, _ = run(dataclasses.replace(OPTIONS, seed=1))
    assert run(OPTIONS)[0] == log
    assert other != log
    calls = [entry for entry in log if entry != READ]
    tokens = [token for _, _, rows, _ in calls for row in rows for token in row]
    assert set(tokens) == set(range(CONFIG.vocab_size))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_whatever_fits_the_model_fits_the_cache_and_leaves_no_gap_in_it(
    data: st.DataObject,
) -> None:
    steps = data.draw(st.integers(1, CONFIG.sequence_len - 1))

    def lengths(limit: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(st.integers(1, limit), min_size=1, max_size=3, unique=True).map(tuple)

    options = BenchOptions(
        prompt_tokens=data.draw(st.none() | lengths(CONFIG.sequence_len - 1)),
        context=data.draw(st.none() | lengths(CONFIG.sequence_len - steps)),
        batch=data.draw(lengths(3)),
        rounds=data.draw(st.integers(1, 2)),
        decode_tokens=steps,
    )
    assert cache_length(options, settings_of(options, CONFIG)) <= CONFIG.sequence_len
    run(options)  # the fake session holds every call to its cache


def test_each_round_is_told_before_it_begins() -> None:
    log: list[Any] = []
    rounds = Rounds(sessions_for(OPTIONS, log), settings_of(OPTIONS, CONFIG), OPTIONS)
    rounds.warm_up()
    log.clear()
    rounds.run(OPTIONS.rounds, reader(log), lambda number: log.append(number))
    told = [place for place, entry in enumerate(log) if isinstance(entry, int)]
    assert [log[place] for place in told] == [1, 2, 3]
    assert all(log[place - 1] == READ for place in told)


# Figures that follow from planted samples.


def test_times_shares_and_medians_follow_from_the_planted_clock_and_ceiling() -> None:
    options = BenchOptions(prompt_tokens=(5,), context=(7,), batch=(2,), rounds=3, decode_tokens=2)
    # Two settings a round: the readings around a decode are 1 and 2, 3 and 4, 5 and 6.
    rates = (0, 40, 60, 0, 200, 90, 110)
    speed: Iterator[float] = itertools.repeat(0.0)

    def took(batch: int, start: int, width: int) -> float:
        return 5.0 if width > 1 else next(speed)

    log: list[Any] = []
    rounds = Rounds(sessions_for(options, log, took), settings_of(options, CONFIG), options)
    rounds.warm_up()
    log.clear()
    speed = iter([9.0, 1.0, 3.0, 9.0, 2.0, 4.0, 9.0, 6.0, 2.0])  # each 9 is not to be counted
    _, (prefill, decode) = rounds.run(3, reader(log, rates))
    assert [sample.seconds for sample in decode] == [(1.0, 3.0), (2.0, 4.0), (6.0, 2.0)]
    assert [sample.step_seconds for sample in decode] == [2.0, 3.0, 4.0]
    assert [sample.ceiling for sample in decode] == [50.0, 100.0, 100.0]
    assert [sample.busy for sample in decode] == [0.5] * 3
    assert [sample.seconds for sample in prefill] == [(5.0,)] * 3
    measured = Measurement(
        setting=settings_of(options, CONFIG)[1],
        samples=tuple(decode),
        traffic=traffic_of(60.0),
    )
    assert measured.step_seconds.median == 3.0
    assert measured.tokens_per_second.median == pytest.approx(2 / 3)
    assert measured.share is not None
    # 60 / (2 * 50), 60 / (3 * 100), 60 / (4 * 100): of each round its own ceiling.
    assert measured.share.largest == pytest.approx(0.6)
    assert measured.share.median == pytest.approx(0.2)
    assert measured.share.smallest == pytest.approx(0.15)
    told = Measurement(
        setting=settings_of(options, CONFIG)[0], samples=tuple(prefill), traffic=None
    )
    assert told.share is None
    assert told.tokens_per_second.median == 2 * 5 / 5.0


def traffic_of(total: float) -> Traffic:
    return Traffic(dense=total, experts=0, head=0, embedding=0, cache=0, experts_per_layer=2)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_a_spread_is_that_of_the_percentiles(values: list[float]) -> None:
    spread = Spread.of(values)
    wanted = np.percentile(values, [0, 25, 50, 75, 100])
    found = [spread.smallest, spread.low, spread.median, spread.high, spread.largest]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert spread.median == pytest.approx(statistics.median(values))
    assert spread.relative == pytest.approx((wanted[3] - wanted[1]) / wanted[2], abs=1e-12)


# Limits.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_tokens": (5, 40)}, r"prompt_tokens 40 is too long; it must be 1 to 39, "),
        ({"context": (37, 9, 99)}, r"context 37,99 is too long; it must be 1 to 36, .*40 tokens"),
        ({"decode_tokens": 40}, r"decode_tokens is 40; this model takes 40 tokens, so 1 to 39"),
    ],
)
def test_lengths_beyond_the_model_are_refused_with_the_range(
    options: dict[str, Any], said: str
) -> None:
    values = {"decode_tokens": 4} | options
    with pytest.raises(RequestError, match=said):
        settings_of(BenchOptions(**values), CONFIG)
    assert settings_of(BenchOptions(prompt_tokens=(39,), context=(36,), decode_tokens=4), CONFIG)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_tokens": (0,)}, "prompt_tokens is 0; it must be numbers from 1"),
        ({"context": ()}, "context is empty; it must be numbers from 1"),
        ({"batch": (1, 2, 1)}, "batch is 1,2,1; name each number once"),
        ({"rounds": 0}, "rounds is 0; it must be 1 or more"),
        ({"decode_tokens": -1}, "decode_tokens is -1; it must be 1 or more"),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
        ({"seed": -1, "batch": (0,)}, "batch is 0; it must be numbers from 1; seed is -1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as error:
        BenchOptions(**options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("longest", "prompts", "contexts"),
    [(8192, (128, 512), (32, 256)), (256, (128, 255), (32, 240)), (40, (39,), (24,))],
)
def test_lengths_that_nobody_chose_are_those_that_fit(
    longest: int, prompts: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    config = dataclasses.replace(CONFIG, sequence_len=longest)
    found = settings_of(BenchOptions(), config)
    lengths = {
        stage: tuple(setting.tokens for setting in found if setting.stage == stage)
        for stage in ("prefill", "decode")
    }
    assert lengths == {"prefill": prompts, "decode": contexts}
