"""Laws of the logprobs; the most probable tokens against results of the original program."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.runtime.params import MOST_LOGPROBS, SamplingParams
from export_grok.runtime.sampling.adjust import adjusted
from export_grok.runtime.sampling.draw import sample
from export_grok.runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from tests.runtime.sampling.logits import INF, NAN, Float32, log_softmax, random_logits, rows


def of(row: Float32, token: int, count: int) -> TokenLogprobs:
    """Return the logprobs of one row [V] that asks for `count`."""
    (result,) = token_logprobs(row[None], [token], [SamplingParams(logprobs=count)])
    assert result is not None
    return result


def test_logprobs_are_raw_whatever_the_token_was_chosen_with() -> None:
    logits = random_logits(1, MOST_LOGPROBS)
    expected = log_softmax(logits[0])
    for params in (
        SamplingParams(logprobs=20),
        SamplingParams(logprobs=20, temperature=0.5),
        SamplingParams(logprobs=20, temperature=0.5, top_k=2, top_p=0.4, min_p=0.3),
        SamplingParams(logprobs=20, repetition_penalty=9.0, logit_bias={3: -INF, 4: 100}),
    ):
        token = sample(adjusted(logits, [params], [[1, 2]]), [params], [0])
        (told,) = token_logprobs(logits, token, [params])
        assert told is not None
        np.testing.assert_allclose(told.logprob, expected[token[0]], rtol=1e-12)
        for entry in told.top:
            np.testing.assert_allclose(entry.logprob, expected[entry.token], rtol=1e-12)
        assert sum(np.exp(entry.logprob) for entry in told.top) == pytest.approx(1, rel=1e-12)


def test_top_probabilities_are_those_of_the_original(goldens: dict[str, NDArray[Any]]) -> None:
    logits = goldens["f32/filtered"]
    expected = goldens["f32/top_k_probs"]
    told = token_logprobs(logits, logits.argmax(-1), [SamplingParams(logprobs=8)] * len(logits))
    for row, each in enumerate(told):
        assert each is not None
        probabilities = np.exp([entry.logprob for entry in each.top])
        np.testing.assert_allclose(probabilities, expected[row], rtol=1e-5, atol=1e-12)
        # Equal probabilities may come in any order, and the 8 may end among equals.
        distinct = [p for p in expected[row] if np.count_nonzero(expected[row] == p) == 1]
        known = np.isin(expected[row], distinct) & (expected[row] > expected[row, -1])
        ids = np.array([entry.token for entry in each.top])
        np.testing.assert_array_equal(ids[known], goldens["f32/top_k_token_ids"][row, known])


@settings(deadline=None)
@given(
    values=st.lists(st.integers(-2, 2), min_size=1, max_size=40),
    count=st.integers(0, MOST_LOGPROBS),
)
def test_the_most_probable_come_first_and_of_equals_the_lowest_id(
    values: list[int], count: int
) -> None:
    row = rows([float(value) for value in values])[0]
    told = of(row, 0, count)
    best = sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]
    assert [entry.token for entry in told.top] == best
    np.testing.assert_allclose(
        [entry.logprob for entry in told.top], log_softmax(row)[best], rtol=1e-12, atol=1e-15
    )


def test_a_row_that_asks_for_none_gets_none_and_may_hold_anything() -> None:
    logits = rows([NAN, NAN], [0, 0], [INF, -INF])
    params = [SamplingParams(), SamplingParams(logprobs=0), SamplingParams(temperature=1.0)]
    told = token_logprobs(logits, [0, 1, 0], params)
    assert told == [None, TokenLogprobs(logprob=float(np.log(0.5))), None]


def test_a_forbidden_token_has_the_logprob_minus_infinity() -> None:
    told = of(rows([-INF, 0, -INF])[0], 2, 3)
    assert told.logprob == -INF
    assert [(entry.token, entry.logprob) for entry in told.top] == [(1, 0), (0, -INF), (2, -INF)]


def test_logits_at_the_ends_of_float32_have_logprobs() -> None:
    largest = float(np.finfo(np.float32).max)
    told = of(rows([largest, -largest, largest])[0], 0, 3)
    assert told.logprob == pytest.approx(np.log(0.5))
    assert [entry.token for entry in told.top] == [0, 2, 1]
    assert told.top[2].logprob == pytest.approx(-2 * largest)


def test_more_than_the_vocabulary_are_all_of_it() -> None:
    assert [entry.token for entry in of(rows([0, 1])[0], 0, 20).top] == [1, 0]


def test_logprobs_do_not_depend_on_the_batch_or_its_layout() -> None:
    logits = random_logits(5, 3000)
    params = [SamplingParams(logprobs=count) for count in (0, 1, 5, 20, 3)]
    together = token_logprobs(logits, range(5), params)
    assert together == token_logprobs(np.asfortranarray(logits), range(5), params)
    for row, each in enumerate(together):
        assert token_logprobs(logits[row : row + 1], [row], params[row : row + 1]) == [each]
