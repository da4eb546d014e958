"""What a user may choose: every value in its range, and every other named with the range."""

import dataclasses
import re
from typing import Any

import pytest

from export_grok.errors import RequestError
from export_grok.runtime.params import (
    LARGEST_FLOAT32,
    SMALLEST_FLOAT32,
    GenerationParams,
    SamplingParams,
)

INF = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "must be 0 .* or a positive number"),
        ("temperature", NAN, "must be 0"),
        ("temperature", INF, r"up to 3.4e\+38"),
        ("temperature", 1e39, r"up to 3.4e\+38"),
        ("temperature", 10**400, r"up to 3.4e\+38"),
        ("temperature", "1", "must be 0"),
        ("top_k", -1, "a whole number, 0"),
        ("top_k", 1.5, "a whole number, 0"),
        ("top_k", True, "a whole number, 0"),
        ("top_p", -0.01, "from 0 to 1"),
        ("top_p", 1.01, "from 0 to 1"),
        ("top_p", NAN, "from 0 to 1"),
        ("top_p", None, "from 0 to 1"),
        ("min_p", -0.01, r"from 0 \(off\) to 1"),
        ("min_p", 1.01, r"from 0 \(off\) to 1"),
        ("min_p", NAN, r"from 0 \(off\) to 1"),
        ("min_p", True, r"from 0 \(off\) to 1"),
        ("repetition_penalty", 0, r"a positive number, 1 \(off\) .* 1.2e-38 to 3.4e\+38"),
        ("repetition_penalty", 1e-39, "1.2e-38 to"),
        ("repetition_penalty", -1.0, "a positive number"),
        ("repetition_penalty", NAN, "a positive number"),
        ("repetition_penalty", INF, r"to 3.4e\+38"),
        ("repetition_penalty", "1.1", "a positive number"),
        ("seed", -1, r"from 0 to 2\*\*64 - 1"),
        ("seed", 2**64, r"from 0 to 2\*\*64 - 1"),
        ("seed", 0.0, r"from 0 to 2\*\*64 - 1"),
        ("logprobs", -1, r"None \(off\) or a whole number from 0 to 20"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", True, "from 0 to 20"),
        ("logprobs", 5.0, "from 0 to 20"),
        ("logit_bias", None, "a mapping of token ids"),
        ("logit_bias", [(1, 2.0)], "a mapping of token ids"),
    ],
)
def test_an_impossible_value_is_refused_with_what_is_allowed(
    field: str, value: Any, allowed: str
) -> None:
    for kind in (SamplingParams, GenerationParams):
        with pytest.raises(RequestError, match=f"^{field} is .*{allowed}"):
            kind(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_new_tokens", 0, "a whole number, 1 or more, or None"),
        ("max_new_tokens", -3, "1 or more"),
        ("max_new_tokens", 2.0, "1 or more"),
        ("max_new_tokens", True, "1 or more"),
        ("stop", None, "a text or a sequence of at most 16 texts, none empty"),
        ("stop", b"end", "a text or a sequence"),
        ("stop", ["end", 3], "a text or a sequence"),
        ("stop", {"end"}, "a text or a sequence"),
        ("stop", [None], "a text or a sequence"),
        ("ignore_eos", 1, "True or False"),
        ("ignore_eos", "no", "True or False"),
    ],
)
def test_an_impossible_value_of_a_request_is_refused_with_what_is_allowed(
    field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(RequestError, match=f"^{field} is .*{allowed}"):
        GenerationParams(**{field: value})


@pytest.mark.parametrize("stop", ["", [""], ("a", "")])
def test_an_empty_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(RequestError, match=r"stop has an empty text at [01], .* none empty"):
        GenerationParams(stop=stop)


def test_sixteen_stop_strings_are_the_most() -> None:
    texts = [str(number) for number in range(17)]
    assert GenerationParams(stop=texts[:16]).stop == tuple(texts[:16])
    with pytest.raises(RequestError, match=r"stop has 17 texts; .* at most 16"):
        GenerationParams(stop=texts)


def test_a_plain_text_is_one_stop_string() -> None:
    assert GenerationParams(stop="end").stop == ("end",)
    assert GenerationParams(stop=["end", "\n"]).stop == ("end", "\n")
    assert GenerationParams().stop == ()


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ((-1, 1.0), "-1: 1.0"),
        (("7", 1.0), "'7': 1.0"),
        ((7.0, 1.0), "7.0: 1.0"),
        ((True, 1.0), "True: 1.0"),
        ((7, 100.5), "7: 100.5"),
        ((7, -101), "7: -101"),
        ((7, INF), "7: inf"),
        ((7, NAN), "7: nan"),
        ((7, "1"), "7: '1'"),
        ((7, None), "7: None"),
        ((7, True), "7: True"),
    ],
)
def test_an_impossible_bias_is_refused_with_what_is_allowed(
    entry: tuple[Any, Any], told: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias={5: 1.0, entry[0]: entry[1]})
    text = str(caught.value)
    assert text.startswith(f"logit_bias has {told}; it must be a mapping of token ids")
    assert "numbers from -100 to 100, or -inf, which forbids the token" in text


def test_of_many_impossible_biases_a_few_are_named() -> None:
    with pytest.raises(RequestError, match=r"0: 200, 1: 200, 2: 200, 3: 200, 4: 200 and 7 more;"):
        SamplingParams(logit_bias=dict.fromkeys(range(12), 200))


def test_all_impossible_values_are_named_at_once() -> None:
    wrong: dict[str, Any] = {
        "temperature": -1,
        "top_k": -2,
        "top_p": 3,
        "min_p": 4,
        "repetition_penalty": -5,
        "logit_bias": 6,
        "seed": -7,
        "logprobs": -8,
        "max_new_tokens": -9,
        "stop": 10,
        "ignore_eos": 11,
    }
    assert set(wrong) == {field.name for field in dataclasses.fields(GenerationParams)}
    with pytest.raises(RequestError) as caught:
        GenerationParams(**wrong)
    for name, value in wrong.items():
        assert re.search(rf"(^|; ){name} is {value}; ", str(caught.value))


def test_values_at_the_ends_of_their_ranges_are_allowed() -> None:
    GenerationParams(
        temperature=LARGEST_FLOAT32,
        top_k=10**12,
        top_p=0,
        min_p=1,
        repetition_penalty=LARGEST_FLOAT32,
        logit_bias={0: -100, 1: 100, 2: -INF, 10**12: 0},
        seed=2**64 - 1,
        logprobs=20,
        max_new_tokens=1,
    )
    GenerationParams(
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=0,
        repetition_penalty=SMALLEST_FLOAT32,
        logit_bias={},
        seed=0,
        logprobs=0,
        max_new_tokens=None,
        ignore_eos=True,
    )


def test_the_bias_is_a_copy_of_what_was_given() -> None:
    given = {1: 2.0}
    params = SamplingParams(logit_bias=given)
    given[1] = 3.0
    assert params.logit_bias == {1: 2.0}
    again = dataclasses.replace(params, seed=1)
    assert again.logit_bias == {1: 2.0}
    assert again.logit_bias is not params.logit_bias


def test_equal_parameters_are_one_key() -> None:
    one = GenerationParams(logit_bias={1: 2.0, 3: -INF}, stop="end")
    other = GenerationParams(logit_bias={3: -INF, 1: 2.0}, stop=("end",))
    assert len({one: 0, other: 0}) == 1
    assert GenerationParams(logit_bias={1: 2.0}) != GenerationParams()


def test_a_bias_beyond_the_vocabulary_is_refused_and_a_large_top_k_is_not() -> None:
    params = SamplingParams(top_k=10**9, logit_bias={7: 1.0, 8: 1.0, 100: -INF})
    params.check_vocabulary(101)
    with pytest.raises(RequestError, match=r"has 8, 100; a token id .* from 0 to 7$"):
        params.check_vocabulary(8)


def test_a_bias_that_bans_the_whole_vocabulary_is_refused() -> None:
    params = GenerationParams(logit_bias=dict.fromkeys(range(5), -INF))
    params.check_vocabulary(6)
    with pytest.raises(RequestError, match="logit_bias forbids all 5 tokens with -inf; leave one"):
        params.check_vocabulary(5)
