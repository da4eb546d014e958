"""How much may be under way: rows first, then places to wait, counted and by tokens."""

import pytest

from export_grok.errors import RequestError
from export_grok.runtime.admission import Limits


def limits(**options: int) -> Limits:
    return Limits(**{"batch": 2, "chunk": 8, "max_waiting": 3, **options})


def test_a_row_that_is_left_takes_a_prompt_of_any_length() -> None:
    assert limits(max_waiting=0, max_waiting_tokens=1).refusal([900], 900) is None


def test_as_many_wait_as_may() -> None:
    assert limits().refusal([1] * 4, 900) is None
    refusal = limits().refusal([1] * 5, 7)
    assert str(refusal).startswith("3 requests with 3 tokens wait for 2 rows, and one of 7 tokens")


def test_tokens_that_wait_are_those_behind_the_rows() -> None:
    few = limits(max_waiting_tokens=10)
    assert few.refusal([500, 500, 6], 4) is None
    refusal = few.refusal([500, 500, 6], 5)
    assert "of 10 tokens together" in str(refusal)


def test_all_limits_out_of_range_are_named_at_once() -> None:
    with pytest.raises(RequestError) as error:
        limits(batch=0, chunk=0, max_waiting=-1, max_waiting_tokens=0)
    for name in ("batch is 0", "chunk is 0", "max_waiting is -1", "max_waiting_tokens is 0"):
        assert name in str(error.value)
