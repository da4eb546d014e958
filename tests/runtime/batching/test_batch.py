"""The loop: an answer is what its request gives alone, whoever comes and goes beside it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.errors import NumericsError
from export_grok.runtime.batching.answer import Answer
from export_grok.runtime.batching.batch import Batch, Token
from export_grok.runtime.params import SamplingParams
from export_grok.runtime.request import Request
from export_grok.runtime.sampling.adjust import adjusted
from export_grok.runtime.sampling.draw import sample
from tests.runtime.fake_session import FakeSession, broken_after, logits_after
from tests.runtime.small_model import SMALL

LENGTH = 40


def fake(batch: int, **options: Any) -> FakeSession:
    return FakeSession(SMALL, batch=batch, max_length=LENGTH, **options)


def request(*prompt: int, **options: Any) -> Request:
    return Request(prompt=prompt, **options)


def alone(wanted: Request) -> tuple[list[int], str]:
    """Return the answer to one request, by the definition: one token after the other."""
    tokens = list(wanted.prompt)
    while True:
        made = len(tokens) - len(wanted.prompt)
        logits = logits_after(tokens, SMALL.vocab_size)[None]
        logits = adjusted(logits, [wanted.sampling], [tokens])
        token = int(sample(logits, [wanted.sampling], [made])[0])
        if token in wanted.stop:
            return tokens[len(wanted.prompt) :], "stop"
        tokens.append(token)
        if made + 1 == wanted.limit(LENGTH):
            return tokens[len(wanted.prompt) :], "length"


def added(batch: Batch, *requests: Request) -> list[Answer]:
    answers = [Answer(each, LENGTH) for each in requests]
    for answer in answers:
        batch.add(answer)
    return answers


def run(batch: Batch) -> list[Token]:
    tokens: list[Token] = []
    while not batch.idle:
        tokens += batch.turn().tokens
    return tokens


def answer_of(answer: Answer) -> tuple[list[int], str | None]:
    return answer.tokens[len(answer.request.prompt) :], answer.finished


def test_more_requests_than_rows_are_all_answered() -> None:
    batch = Batch(fake(2))
    requests = [request(1 + n, 2, max_new_tokens=n + 1) for n in range(7)]
    answers = added(batch, *requests)
    run(batch)
    assert [answer_of(answer) for answer in answers] == [alone(each) for each in requests]


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {3: 1.5}, {5: -100}]),
    seed=st.integers(0, 3),
)
prompts = st.one_of(
    st.lists(st.integers(0, SMALL.vocab_size - 1), min_size=1, max_size=LENGTH - 1),
    # Beginnings in common, long enough to be copied.
    st.builds(
        lambda same, rest: [7] * same + rest,
        st.integers(14, 30),
        st.lists(st.integers(0, SMALL.vocab_size - 1), min_size=1, max_size=6),
    ),
)
requests_ = st.builds(
    Request,
    prompt=prompts.map(tuple),
    sampling=params,
    max_new_tokens=st.one_of(st.none(), st.integers(1, 12)),
    stop=st.sampled_from([frozenset(), frozenset({2}), frozenset({4, 5})]),
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(requests_, min_size=1, max_size=9),
    rows=st.integers(1, 4),
    together=st.integers(1, 4),
    chunk=st.integers(1, 20),
    budget=st.integers(1, 30),
    data=st.data(),
)
def test_any_mix_of_arrivals_lengths_and_cancels_gives_each_what_it_gets_alone(
    requests: list[Request], rows: int, together: int, chunk: int, budget: int, data: st.DataObject
) -> None:
    batch = Batch(fake(rows, prefill_rows=together), chunk=chunk, budget=budget)
    to_come = [Answer(each, LENGTH) for each in requests]
    answers = list(to_come)
    seen: dict[Answer, list[int]] = {answer: [] for answer in answers}
    ends: dict[Answer, str] = {}
    cancelled: set[Answer] = set()
    while to_come or not batch.idle:
        while to_come and (batch.idle or data.draw(st.booleans())):
            batch.add(to_come.pop(0))
        open_ = [a for a in answers if a not in to_come and a not in ends]
        if open_ and data.draw(st.integers(0, 9)) == 0:
            chosen = data.draw(st.sampled_from(open_))
            batch.end(chosen, "cancelled")
            ends[chosen] = "cancelled"
            cancelled.add(chosen)
        for token in batch.turn().tokens:
            assert token.answer not in ends, "an answer goes on after its end"
            if token.token is not None:
                seen[token.answer].append(token.token)
            if token.finished is not None:
                ends[token.answer] = token.finished
    for answer in answers:
        wanted, reason = alone(answer.request)
        if answer in cancelled:
            assert seen[answer] == wanted[: len(seen[answer])]
            assert answer.finished == "cancelled"
        else:
            assert (seen[answer], ends[answer]) == (wanted, reason)
            assert len(answer.request.prompt) + len(wanted) <= LENGTH
    load = batch.load()
    assert (load.running, load.waiting, load.cache_tokens) == (0, 0, 0)


def test_first_come_is_first_served() -> None:
    batch = Batch(fake(1))
    started: list[Answer] = []
    batch = Batch(fake(1), on_start=started.append)
    answers = added(batch, *(request(n, max_new_tokens=1) for n in (5, 3, 4)))
    run(batch)
    assert started == answers


def test_a_long_prompt_keeps_the_others_waiting_for_one_chunk_at_most() -> None:
    session = fake(2)
    batch = Batch(session, chunk=4, budget=4)
    (short,) = added(batch, request(1, 2, max_new_tokens=20))
    batch.turn()
    (long,) = added(batch, request(*range(1, 12), *range(1, 12), max_new_tokens=1))
    while long.finished is None:
        made, calls = short.made, len(session.calls)
        batch.turn()
        assert short.made == made + 1
        assert sum(session.calls[calls:]) <= 4 + 1  # a chunk, and the token


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    batch = Batch(fake(2), chunk=8, budget=8)
    long, short = added(batch, request(*[1, 2, 3] * 10), request(5, 6, max_new_tokens=1))
    batch.turn()
    assert short.finished == "length"
    assert long.made == 0


@pytest.mark.parametrize("together", [1, 2])
def test_rows_that_go_one_by_one_take_turns(together: int) -> None:
    session = fake(2, prefill_rows=together)
    batch = Batch(session, chunk=4, budget=4)
    answers = added(batch, request(*[1] * 12), request(*[2] * 12))
    batch.turn()
    batch.turn()
    assert [answer.held for answer in answers] == [4, 4]


def test_a_row_is_free_in_the_turn_behind_its_answers_end() -> None:
    session = fake(1)
    batch = Batch(session)
    first, second = added(batch, request(1, max_new_tokens=2), request(2, max_new_tokens=1))
    batch.turn()
    batch.turn()
    assert (first.finished, second.row) == ("length", None)
    batch.turn()
    assert second.finished == "length"


def test_what_a_prompt_has_in_common_with_a_row_is_not_computed_again() -> None:
    session = fake(2)
    batch = Batch(session)
    same = [3] * 20
    (first,) = added(batch, request(*same, 5, max_new_tokens=3))
    run(batch)
    session.calls.clear()
    (second,) = added(batch, request(*same, 6, max_new_tokens=1))
    run(batch)
    assert session.copies == [(0, 1, 20)]
    assert session.calls == [1]
    assert (first.cached, second.cached) == (0, 20)
    assert answer_of(second) == alone(second.request)


def test_an_answer_is_continued_in_its_row() -> None:
    session = fake(2)
    batch = Batch(session)
    (first,) = added(batch, request(1, 2, 3, max_new_tokens=4))
    run(batch)
    (second,) = added(batch, request(*first.tokens, 8, max_new_tokens=2))
    run(batch)
    assert second.row == first.row
    assert second.cached == 6  # all but the last token, which nobody had fed
    assert session.copies == []
    assert answer_of(second) == alone(second.request)


def test_an_answer_without_numbers_ends_and_the_others_go_on() -> None:
    session = fake(3, logits_of=broken_after(4, begins=2))
    batch = Batch(session)
    requests = [request(n, 5, max_new_tokens=6) for n in (1, 2, 3)]
    answers = added(batch, *requests)
    tokens = run(batch)
    assert [answer.finished for answer in answers] == ["length", "error", "length"]
    for answer in (answers[0], answers[2]):
        assert answer_of(answer) == alone(answer.request)
    (error,) = [token.error for token in tokens if token.error is not None]
    assert isinstance(error, NumericsError)
    assert "step 2" in str(error)


def test_keys_of_an_answer_without_numbers_are_not_reused() -> None:
    session = fake(1, logits_of=broken_after(4, begins=2))
    batch = Batch(session)
    added(batch, request(2, 5, max_new_tokens=6))
    run(batch)
    (second,) = added(batch, request(2, 5, 1, max_new_tokens=1))
    run(batch)
    assert second.cached == 0


def test_a_request_that_bans_every_token_ends_with_that_error() -> None:
    batch = Batch(fake(1))
    ban = SamplingParams(logit_bias=dict.fromkeys(range(SMALL.vocab_size), -np.inf))
    added(batch, request(1, sampling=ban))
    (end,) = run(batch)
    assert end.finished == "error"
    assert "bias" in str(end.error)


def test_logprobs_come_with_the_tokens_of_those_who_want_them() -> None:
    batch = Batch(fake(2))
    _, two = added(
        batch,
        request(1, max_new_tokens=3, sampling=SamplingParams(logprobs=2)),
        request(2, max_new_tokens=3),
    )
    for token in run(batch):
        if token.answer is two:
            assert token.logprobs is None
            continue
        assert token.logprobs is not None
        assert token.logprobs.top[0].token == token.token  # greedy
        assert len(token.logprobs.top) == 2


def test_an_answer_may_be_ended_wherever_it_is() -> None:
    batch = Batch(fake(1), chunk=2)
    decoding, waiting = added(batch, request(1, 2), request(3, 4))
    batch.turn()
    batch.end(waiting, "cancelled")
    batch.end(decoding, "stop")
    batch.end(decoding, "cancelled")  # it has ended
    assert batch.idle
    assert (decoding.finished, waiting.finished) == ("stop", "cancelled")
    (again,) = added(batch, request(5, 6, 7, 8, 9))
    batch.turn()
    batch.end(again, "cancelled")  # in the middle of its prompt
    (last,) = added(batch, request(5, 6, 7, 8, 9, max_new_tokens=2))
    run(batch)
    assert last.cached == 2
    assert answer_of(last) == alone(last.request)


def test_the_load_counts_rows_and_tokens() -> None:
    batch = Batch(fake(2))
    added(batch, request(1, 2, 3, max_new_tokens=2), request(4), request(5))
    batch.turn()
    load = batch.load()
    assert (load.batch, load.running, load.waiting) == (2, 2, 1)
    assert (load.cache_tokens, load.capacity) == (4, 2 * LENGTH)
    run(batch)
    load = batch.load()
    assert (load.running, load.waiting, load.cache_tokens) == (0, 0, 0)
    assert load.kept_tokens > 0


def test_a_turn_tells_what_it_did() -> None:
    batch = Batch(fake(2), chunk=4, budget=4)
    added(batch, request(1, 2, 3))
    turn = batch.turn()
    assert (turn.prefilled, turn.decoded, len(turn.tokens)) == (3, 0, 1)
    added(batch, request(1, 9, 3, 4, 5, 6))
    turn = batch.turn()
    assert (turn.prefilled, turn.decoded, len(turn.tokens)) == (4, 1, 1)
