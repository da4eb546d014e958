"""Laws of the penalty and the bias."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.runtime.params import LARGEST_FLOAT32, SMALLEST_FLOAT32, SamplingParams
from export_grok.runtime.sampling.adjust import adjusted
from export_grok.runtime.sampling.draw import row_faults
from tests.runtime.sampling.logits import INF, NAN, Float32, random_logits, rows


def one(values: list[float], params: SamplingParams, history: Sequence[int] = ()) -> list[float]:
    """Return one adjusted row."""
    result: list[float] = adjusted(rows(values), [params], [history])[0].tolist()
    return result


def test_a_batch_that_wants_nothing_gets_its_own_array_back() -> None:
    logits = random_logits(2, 10)
    params = [SamplingParams(temperature=0.5, top_k=3, logprobs=4), SamplingParams()]
    assert adjusted(logits, params, [[1, 2], []]) is logits


def test_what_is_given_is_never_written_to() -> None:
    logits = random_logits(2, 10)
    logits.flags.writeable = False
    history = np.array([1, 2])
    history.flags.writeable = False
    params = SamplingParams(repetition_penalty=1.5, logit_bias={1: 2.0})
    result = adjusted(logits, [params, SamplingParams()], [history, history])
    assert (result[0] != logits[0]).any()
    np.testing.assert_array_equal(result[1], logits[1])


def test_a_penalty_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    assert one([4, -4, 0, 4, -4, -INF], params, [0, 1, 2, 5]) == [2, -8, 0, 4, -4, -INF]
    params = SamplingParams(repetition_penalty=0.5)
    assert one([4, -4, 0, 4, -4, -INF], params, [0, 1, 2, 5]) == [8, -2, 0, 4, -4, -INF]


def test_a_token_is_penalised_once_however_often_it_came() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    assert one([4, 8, 1], params, [1, 0, 1, 1]) == one([4, 8, 1], params, [0, 1]) == [2, 4, 1]


@settings(deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=12),
    penalty=st.floats(SMALLEST_FLOAT32, LARGEST_FLOAT32, width=32),
    history=st.lists(st.integers(0, 2), max_size=6),
)
def test_a_penalty_never_makes_a_number_of_no_number_or_forbids_a_token(
    values: list[float], penalty: float, history: list[int]
) -> None:
    before = rows(values)[0]
    after = np.array(one(values, SamplingParams(repetition_penalty=penalty), history))
    np.testing.assert_array_equal(np.isfinite(after), np.isfinite(before))
    np.testing.assert_array_equal(after[~np.isfinite(after)], before[~np.isfinite(before)])
    untouched = [token for token in range(len(values)) if token not in history]
    np.testing.assert_array_equal(after[untouched], before[untouched])
    # Above 1 no logit grows, below 1 none shrinks.
    assert (after <= before).all() if penalty >= 1 else (after >= before).all()


def test_a_penalty_that_leaves_float32_ends_at_its_ends() -> None:
    strong = SamplingParams(repetition_penalty=LARGEST_FLOAT32)
    assert one([2, -2], strong, [0, 1])[1] == -LARGEST_FLOAT32
    weak = SamplingParams(repetition_penalty=SMALLEST_FLOAT32)
    assert one([16, -16], weak, [0, 1])[0] == LARGEST_FLOAT32


def test_a_bias_is_added_and_minus_infinity_forbids() -> None:
    params = SamplingParams(logit_bias={0: 1.5, 2: -INF, 3: -100, 4: 100})
    assert one([1, 1, 1, 1, -INF], params) == [2.5, 1, -INF, -99, -INF]
    assert one(
        [LARGEST_FLOAT32, -LARGEST_FLOAT32], SamplingParams(logit_bias={0: 100, 1: -100})
    ) == [
        LARGEST_FLOAT32,
        -LARGEST_FLOAT32,
    ]


def test_the_bias_comes_after_the_penalty() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0, 1: -3.0})
    # The other way round it were 3.5 and -4.
    assert one([4, 1], params, [0, 1]) == [5, -2.5]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("bias", [{}, {1: 5.0}, {1: -INF}])
def test_no_penalty_and_no_ban_hides_a_fault_of_the_engine(
    value: float, bias: dict[int, float]
) -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias=bias)
    x = adjusted(rows([0, value, 1]), [params], [[0, 1, 2]])
    assert "1 of 3 logits are NaN or +inf" in row_faults(x, [0], [params])[0]


@settings(deadline=None)
@given(seed=st.integers(0, 100), data=st.data())
def test_a_row_is_adjusted_as_if_it_were_alone(seed: int, data: st.DataObject) -> None:
    logits: Float32 = random_logits(4, 20, seed)
    params = [
        SamplingParams(
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.3, 1.7])),
            logit_bias=data.draw(st.dictionaries(st.integers(0, 19), st.floats(-100, 100))),
        )
        for _ in range(4)
    ]
    token = st.integers(0, 19)
    histories = [data.draw(st.lists(token, max_size=30)) for _ in range(4)]
    together = adjusted(logits, params, histories)
    for row in range(4):
        alone = adjusted(logits[row : row + 1], [params[row]], [histories[row]])
        np.testing.assert_array_equal(together[row], alone[0])


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, 1 params, 3 histories"):
        adjusted(random_logits(2, 5), [SamplingParams()], [[], [], []])
