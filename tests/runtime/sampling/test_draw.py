"""Laws of the draw: which tokens, how often, and what a row depends on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.errors import NumericsError, RequestError
from export_grok.runtime.params import SamplingParams
from export_grok.runtime.sampling.adjust import adjusted
from export_grok.runtime.sampling.draw import row_faults, sample
from tests.runtime.sampling.logits import INF, NAN, Float32, random_logits, rows


def draws(logits: list[float], params: SamplingParams, count: int = 2000) -> NDArray[np.int64]:
    """Return the tokens of steps 0, 1, ... count - 1 from the same logits."""
    batch = np.repeat(rows(logits), count, axis=0)
    return sample(batch, [params] * count, range(count))


def chosen(
    logits: Float32,
    params: Sequence[SamplingParams],
    histories: Sequence[Sequence[int]],
    steps: Sequence[int],
) -> list[int]:
    """Return the tokens of rows as the runtime chooses them."""
    tokens: list[int] = sample(adjusted(logits, params, histories), params, steps).tolist()
    return tokens


def test_a_draw_stays_in_the_nucleus_of_the_original(goldens: dict[str, NDArray[Any]]) -> None:
    logits = np.where(goldens["mask"] != 0, goldens["logits"], np.float32(-np.inf))
    for seed in range(50):
        params = [
            SamplingParams(temperature=float(t), top_p=float(p), seed=seed)
            for t, p in zip(goldens["temperature"], goldens["nucleus_p"], strict=True)
        ]
        tokens = sample(logits, params, [0] * len(params))
        assert goldens["f32/kept"][np.arange(len(params)), tokens].all()


def test_temperature_0_is_the_largest_logit_every_time_and_a_negative_one_is_refused() -> None:
    logits = random_logits(1, 5000)
    largest = int(logits.argmax())
    for temperature in (0.0, 1e-6):
        params = SamplingParams(temperature=temperature)
        assert [sample(logits, [params], [step]).item() for step in range(10)] == [largest] * 10
    for wrong in (-1.0, NAN):
        with pytest.raises(RequestError, match="temperature is"):
            SamplingParams(temperature=wrong)


def test_the_ends_of_top_p_and_top_k_are_the_largest_or_no_filter() -> None:
    logits = [0.0, 1.0, 3.0, 2.0]
    some = SamplingParams(temperature=5.0)
    unfiltered = draws(logits, some, 200).tolist()
    assert set(unfiltered) == {0, 1, 2, 3}
    for same in ({"top_p": 1.0}, {"top_k": 0}, {"top_k": 4}, {"top_k": 5}, {"min_p": 0.0}):
        params = SamplingParams(temperature=5.0, **same)
        assert draws(logits, params, 200).tolist() == unfiltered
    for greedy in ({"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}):
        params = SamplingParams(temperature=5.0, **greedy)
        assert set(draws(logits, params, 200).tolist()) == {2}
    # The most probable token alone has more than this mass: it is kept all the same.
    assert set(draws([9.0, 0.0], SamplingParams(temperature=1.0, top_p=0.1), 50).tolist()) == {0}
    with pytest.raises(RequestError, match=r"top_p is 1\.1"):
        SamplingParams(top_p=1.1)


def test_the_same_seed_gives_the_same_tokens_twice_alone_and_inside_eight() -> None:
    params = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=1234
    )
    others = [
        SamplingParams(temperature=1.5, seed=seed, repetition_penalty=1 + seed / 10)
        for seed in range(8)
    ]

    def answer(place: int | None, model: int) -> list[int]:
        """Return ten tokens, each from logits that those before it decide."""
        made: list[int] = []
        for step in range(10):
            mine = random_logits(1, 500, seed=model + sum(made))
            history = [7, *made]
            if place is None:
                made += chosen(mine, [params], [history], [step])
                continue
            logits = random_logits(8, 500, seed=step)
            logits[place] = mine
            requests = [*others[:place], params, *others[place + 1 :]]
            histories = [history if row == place else [row] for row in range(8)]
            steps = [step if row == place else 3 * row for row in range(8)]
            made.append(chosen(logits, requests, histories, steps)[place])
        return made

    alone = answer(None, model=5)
    assert len(set(alone)) > 5
    assert answer(None, model=5) == alone
    assert [answer(place, model=5) for place in range(8)] == [alone] * 8


def test_greedy_is_the_default_and_takes_the_lowest_id_among_equals() -> None:
    tokens = sample(rows([1, 3, 3, 2], [-1, -INF, -2, -1]), [SamplingParams()] * 2, [0, 7])
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [1, 0]


def test_greedy_is_the_largest_of_the_adjusted_logits() -> None:
    logits = rows([4, 3, 2])
    assert chosen(logits, [SamplingParams(repetition_penalty=2.0)], [[0]], [0]) == [1]
    assert chosen(logits, [SamplingParams(logit_bias={0: -INF, 2: 1.5})], [[]], [0]) == [2]


def test_an_empty_batch_gives_no_token() -> None:
    assert sample(np.zeros((0, 5), np.float32), [], []).shape == (0,)


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 9),
    vocabulary=st.integers(1, 300),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_a_row_draws_alone_what_it_draws_in_any_batch(
    count: int, vocabulary: int, seed: int, data: st.DataObject
) -> None:
    logits = random_logits(count, vocabulary, seed)
    token = st.integers(0, vocabulary - 1)
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0])),
            top_k=data.draw(st.integers(0, 400)),
            top_p=data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
            min_p=data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 1.3])),
            logit_bias=data.draw(st.dictionaries(token, st.floats(-100, 100), max_size=3)),
            seed=data.draw(st.integers(0, 2**64 - 1)),
        )
        for _ in range(count)
    ]
    histories = [data.draw(st.lists(token, max_size=10)) for _ in range(count)]
    steps = data.draw(st.lists(st.integers(0, 2**31), min_size=count, max_size=count))
    together = chosen(logits, params, histories, steps)
    alone = [
        chosen(logits[row : row + 1], [params[row]], [histories[row]], [steps[row]])
        for row in range(count)
    ]
    order = data.draw(st.permutations(range(count)))
    shuffled = chosen(
        logits[order],
        [params[row] for row in order],
        [histories[row] for row in order],
        [steps[row] for row in order],
    )
    assert [[token] for token in together] == alone
    assert shuffled == [together[row] for row in order]
    assert chosen(np.asfortranarray(logits), params, histories, steps) == together


def test_the_same_seed_and_step_give_the_token_they_gave_in_every_release() -> None:
    # These numbers are Philox's, whatever the platform or the version of numpy.
    logits = np.zeros((1, 1000), np.float32)
    params = SamplingParams(temperature=1.0, seed=7)
    tokens = [sample(logits, [params], [step]).item() for step in range(6)]
    assert tokens == [872, 82, 14, 442, 61, 454]


def test_seeds_and_steps_give_different_tokens() -> None:
    logits = np.zeros((1, 100_000), np.float32)
    seen = {
        sample(logits, [SamplingParams(temperature=1.0, seed=seed)], [step]).item()
        for seed in range(5)
        for step in range(5)
    }
    assert len(seen) == 25


@pytest.mark.parametrize(
    ("params", "weights"),
    [
        (SamplingParams(temperature=1.0), [8, 4, 2, 1, 1]),
        (SamplingParams(temperature=0.5), [64, 16, 4, 1, 1]),
        (SamplingParams(temperature=1.0, top_k=2), [2, 1, 0, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.8), [4, 2, 1, 0, 0]),
        (SamplingParams(temperature=1.0, top_p=0.7), [2, 1, 0, 0, 0]),
        # the two at the threshold are equal: both stay
        (SamplingParams(temperature=1.0, top_p=0.9), [8, 4, 2, 1, 1]),
        # of those that top_k leaves, 4 in 6 are more than half: the nucleus comes after
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.6), [1, 0, 0, 0, 0]),
        (SamplingParams(temperature=1.0, min_p=0.2), [4, 2, 1, 0, 0]),
        # of the largest at this temperature 4 in 64 are less: min_p comes after
        (SamplingParams(temperature=0.5, min_p=0.2), [4, 1, 0, 0, 0]),
        # without the last two, 12 in 14 would be enough: the nucleus comes before
        (SamplingParams(temperature=1.0, top_p=0.8, min_p=0.2), [4, 2, 1, 0, 0]),
        (SamplingParams(temperature=1.0, top_k=3, min_p=0.4), [2, 1, 0, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_their_probability(
    params: SamplingParams, weights: list[int]
) -> None:
    logits = [float(np.log(weight)) for weight in (8, 4, 2, 1, 1)]
    count = 4000
    seen = np.bincount(draws(logits, params, count), minlength=5)
    expected = np.array(weights) / sum(weights) * count
    assert not seen[expected == 0].any()
    some = expected > 0
    # 4 degrees of freedom at most: chi-square is above 20 once in 2000 seeds, and this is one.
    assert ((seen - expected)[some] ** 2 / expected[some]).sum() < 20


@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("top_k", [0, 3, 5, 6, 10**9])
def test_a_forbidden_token_is_never_drawn(top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = draws([-INF, 0.0, -INF, -1.0, -INF], params, 200)
    assert set(tokens.tolist()) == ({1} if top_p == 0 else {1, 3})


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (1 - 2.0**-53, 3)])
@pytest.mark.parametrize("top_k", [0, 4])
def test_the_ends_of_the_random_numbers_draw_what_is_allowed(
    u: float, token: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export_grok.runtime.sampling.draw._uniform", lambda seed, step: u)
    params = SamplingParams(temperature=0.7, top_k=top_k)
    assert draws([-INF, 0.3, 0.1, 0.2, -INF], params, 1) == [token]
    logits = random_logits(300, 20)
    logits[:, [0, 4, 19]] = -np.inf
    drawn = sample(logits, [params] * 300, [0] * 300)
    assert np.isfinite(logits[np.arange(300), drawn]).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-37, 1e-40, 1e-46, 5e-324])
@pytest.mark.parametrize("shift", [-30.0, 0.0, 30.0])
@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.5}, {"min_p": 1.0}, {"top_k": 5, "top_p": 0.5, "min_p": 0.3}]
)
def test_a_tiny_temperature_draws_among_the_largest(
    temperature: float, shift: float, filters: dict[str, Any]
) -> None:
    logits = [shift - 1, shift, shift - 2, shift, -INF, shift - 25]
    params = SamplingParams(temperature=temperature, **filters)
    assert set(draws(logits, params, 60).tolist()) == {1, 3}


def test_a_huge_temperature_makes_all_tokens_equal() -> None:
    params = SamplingParams(temperature=3.4e38, min_p=0.9)
    assert set(draws([-50.0, 0.0, 50.0, -INF], params, 100).tolist()) == {0, 1, 2}


def test_the_ends_of_float32_are_drawn_from() -> None:
    largest = float(np.finfo(np.float32).max)
    params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1)
    assert set(draws([-largest, largest, largest], params, 50).tolist()) == {1, 2}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"min_p": 1.0}])
def test_of_equals_everywhere_each_is_drawn(filters: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, **filters)
    assert set(draws([2.0] * 5, params, 200).tolist()) == set(range(5))
    best = SamplingParams(temperature=1.0, top_k=2, **filters)
    assert set(draws([2.0] * 5, best, 200).tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_is_refused_with_its_row_and_step(temperature: float) -> None:
    logits = rows([0, 1, 2], [0, NAN, INF], [0, 1, -INF], [-INF, -INF, -INF], [INF, 0, 0])
    params = [SamplingParams(temperature=temperature)] * 5
    with pytest.raises(NumericsError) as caught:
        sample(logits, params, [10, 11, 12, 13, 14])
    text = str(caught.value)
    assert "row 1, step 11: 2 of 3 logits are NaN or +inf, the first is nan at token 1" in text
    assert "row 3, step 13: every logit is -inf" in text
    assert "row 4, step 14: 1 of 3" in text
    assert "row 0" not in text
    assert "row 2" not in text


def test_the_rows_that_cannot_be_drawn_from_are_told_and_the_others_can() -> None:
    logits = rows([0, 1], [NAN, 0], [0, -INF])
    faults = row_faults(logits, np.array([3, 4, 5]))
    assert list(faults) == [1]
    assert faults[1].startswith("step 4: 1 of 2 logits are NaN or +inf, the first is nan at")
    assert "compare the engine with the reference" in faults[1]
    good = [row for row in range(3) if row not in faults]
    assert sample(logits[good], [SamplingParams()] * 2, [3, 5]).tolist() == [1, 0]


def test_a_bias_that_bans_every_token_is_the_fault_of_the_request() -> None:
    logits = rows([0, 1, 2], [0, 1, -INF], [-INF, -INF, -INF], [0, 1, 2])
    all_three = SamplingParams(logit_bias=dict.fromkeys(range(3), -INF))
    two = SamplingParams(logit_bias={0: -INF, 1: -INF, 2: 100.0})
    params = [all_three, two, SamplingParams(), two]
    x = adjusted(logits, params, [[]] * 4)
    faults = row_faults(x, [0] * 4, params)
    assert list(faults) == [0, 1, 2]
    assert "the request's logit_bias forbids every token" in faults[0]
    assert "the request's logit_bias forbids 2 of 3 tokens and the engine all others" in faults[1]
    assert "every logit is -inf" in faults[2]
    with pytest.raises(NumericsError, match="row 0, step 7: the request's logit_bias forbids"):
        sample(x[:1], params[:1], [7])


@pytest.mark.parametrize(
    ("logits", "count", "steps", "fault"),
    [
        (np.zeros((2, 3), np.float64), 2, [0, 0], "float64"),
        (np.zeros(3, np.float32), 3, [0, 0, 0], r"\(3,\)"),
        (np.zeros((2, 0), np.float32), 2, [0, 0], r"\(2, 0\)"),
        (np.zeros((2, 3), np.float32), 1, [0, 0], "params has 1"),
        (np.zeros((2, 3), np.float32), 2, [0], "step has 1"),
        (np.zeros((2, 3), np.float32), 2, [0, -1], r"step is \[0, -1\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    logits: Any, count: int, steps: list[int], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        sample(logits, [SamplingParams()] * count, steps)


def test_the_logits_are_left_as_they_were() -> None:
    logits = random_logits(2, 40)
    logits.flags.writeable = False
    sample(logits, [SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)] * 2, [0, 1])
