"""Laws of the sampler; the filters against results of the original program."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.errors import NumericsError, RequestError
from export_grok.runtime.params import SamplingParams
from export_grok.runtime.sampling import (
    filtered,
    nucleus_mask,
    sample,
    scaled,
    top_k_mask,
    top_probabilities,
)

DATA = Path(__file__).resolve().parents[1] / "data"
INF = float("inf")
NAN = float("nan")

Float32 = NDArray[np.float32]


def rows(*values: list[float]) -> Float32:
    return np.array(values, dtype=np.float32)


def random_logits(count: int, vocabulary: int, seed: int = 0) -> Float32:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((count, vocabulary)) * 3).astype(np.float32)


def draws(logits: list[float], params: SamplingParams, count: int = 2000) -> NDArray[np.int64]:
    """Return the tokens of steps 0, 1, ... count - 1 from the same logits."""
    batch = np.repeat(rows(logits), count, axis=0)
    return sample(batch, [params] * count, range(count))


@pytest.fixture(scope="module")
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(DATA / "sampler_goldens.npz") as file:
        return dict(file)


def test_temperature_divides_as_in_the_original(goldens: dict[str, NDArray[Any]]) -> None:
    x = scaled(goldens["logits"], goldens["temperature"])
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, goldens["f32/scaled"])
    again = scaled(goldens["logits"], goldens["temperature"].tolist())
    assert again.dtype == np.float32
    np.testing.assert_array_equal(again, x)


def test_nucleus_keeps_what_the_original_keeps(goldens: dict[str, NDArray[Any]]) -> None:
    allowed = goldens["mask"] != 0
    x = filtered(scaled(goldens["logits"], goldens["temperature"]), allowed)
    keep = nucleus_mask(x, goldens["nucleus_p"])
    x = filtered(x, keep)
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, goldens["f32/filtered"])
    np.testing.assert_array_equal(keep & allowed, goldens["f32/kept"])


def test_top_probabilities_are_those_of_the_original(goldens: dict[str, NDArray[Any]]) -> None:
    ids, probabilities = top_probabilities(goldens["f32/filtered"], 8)
    expected = goldens["f32/top_k_probs"]
    assert ids.dtype == np.int64
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5, atol=1e-12)
    for row in range(len(ids)):
        # Equal probabilities may come in any order, and the 8 may end among equals.
        distinct = [p for p in expected[row] if np.count_nonzero(expected[row] == p) == 1]
        known = np.isin(expected[row], distinct) & (expected[row] > expected[row, -1])
        np.testing.assert_array_equal(ids[row, known], goldens["f32/top_k_token_ids"][row, known])


def test_a_draw_stays_in_the_nucleus_of_the_original(goldens: dict[str, NDArray[Any]]) -> None:
    logits = np.where(goldens["mask"] != 0, goldens["logits"], np.float32(-np.inf))
    for seed in range(50):
        params = [
            SamplingParams(temperature=float(t), top_p=float(p), seed=seed)
            for t, p in zip(goldens["temperature"], goldens["nucleus_p"], strict=True)
        ]
        tokens = sample(logits, params, [0] * len(params))
        assert goldens["f32/kept"][np.arange(len(params)), tokens].all()


def test_greedy_is_the_default_and_takes_the_lowest_id_among_equals() -> None:
    tokens = sample(rows([1, 3, 3, 2], [-1, -INF, -2, -1]), [SamplingParams()] * 2, [0, 7])
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [1, 0]


def test_an_empty_batch_gives_no_token() -> None:
    assert sample(np.zeros((0, 5), np.float32), [], []).shape == (0,)


@settings(max_examples=60, deadline=None)
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
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0])),
            top_k=data.draw(st.integers(0, 400)),
            top_p=data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
        )
        for _ in range(count)
    ]
    steps = data.draw(st.lists(st.integers(0, 2**31), min_size=count, max_size=count))
    together = sample(logits, params, steps)
    alone = [
        sample(logits[row : row + 1], [params[row]], [steps[row]]).item() for row in range(count)
    ]
    order = data.draw(st.permutations(range(count)))
    shuffled = sample(logits[order], [params[row] for row in order], [steps[row] for row in order])
    assert together.tolist() == alone
    assert shuffled.tolist() == together[order].tolist()
    assert sample(np.asfortranarray(logits), params, np.array(steps)).tolist() == alone


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


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("top_k", [0, 3, 5, 6, 10**9])
def test_a_forbidden_token_is_never_drawn(top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=2.0, top_k=top_k, top_p=top_p)
    tokens = draws([-INF, 0.0, -INF, -1.0, -INF], params, 300)
    assert set(tokens.tolist()) == ({1} if top_p == 0 else {1, 3})


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (1 - 2.0**-53, 3)])
def test_the_ends_of_the_random_numbers_draw_what_is_allowed(
    u: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export_grok.runtime.sampling._uniform", lambda seed, step: u)
    assert draws([-INF, 0.3, 0.1, 0.2, -INF], SamplingParams(temperature=0.7), 1) == [token]


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-37, 1e-40, 1e-46, 5e-324])
@pytest.mark.parametrize("shift", [-30.0, 0.0, 30.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_tiny_temperature_draws_among_the_largest(
    temperature: float, shift: float, top_p: float
) -> None:
    logits = [shift - 1, shift, shift - 2, shift, -INF, shift - 25]
    params = SamplingParams(temperature=temperature, top_k=5, top_p=top_p)
    tokens = draws(logits, params, 60)
    assert set(tokens.tolist()) == {1, 3}
    assert not np.isnan(scaled(rows(logits), [temperature])).any()


def test_a_huge_temperature_makes_all_tokens_equal() -> None:
    params = SamplingParams(temperature=3.4e38)
    assert set(draws([-50.0, 0.0, 50.0, -INF], params, 100).tolist()) == {0, 1, 2}


def test_the_ends_of_float32_are_drawn_from() -> None:
    largest = float(np.finfo(np.float32).max)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    assert set(draws([-largest, largest, largest], params, 50).tolist()) == {1, 2}


def test_nucleus_of_nothing_keeps_the_largest_and_its_equals() -> None:
    logits = random_logits(20, 500)
    logits[0, [3, 400]] = 50
    keep = nucleus_mask(logits, [0.0] * 20)
    np.testing.assert_array_equal(keep, logits == logits.max(axis=-1, keepdims=True))


def test_nucleus_of_everything_keeps_everything() -> None:
    logits = rows([0, -1e10, -100, -INF])
    assert nucleus_mask(logits, [1.0]).all()


def test_each_row_has_its_own_nucleus() -> None:
    logits = random_logits(3, 50)
    together = nucleus_mask(logits, [0.5, 1.0, 0.9])
    for row, top_p in enumerate([0.5, 1.0, 0.9]):
        alone = nucleus_mask(logits[row : row + 1], [top_p])
        np.testing.assert_array_equal(together[row], alone[0])


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    top_p=st.floats(0, 1, width=32),
)
def test_nucleus_is_the_smallest_set_of_enough_mass(values: list[int], top_p: float) -> None:
    logits = rows([float(value) for value in values])
    keep = nucleus_mask(logits, [top_p])[0]
    assert keep.any()
    mass = np.exp(logits[0].astype(np.float64))
    mass /= mass.sum()
    lowest = logits[0][keep].min()
    assert (keep == (logits[0] >= lowest)).all()
    assert mass[keep].sum() >= top_p - 1e-6
    # Without all the equals at the threshold it would fall short.
    assert mass[logits[0] > lowest].sum() <= top_p + 1e-6


@given(values=st.lists(st.integers(-2, 2), min_size=1, max_size=20), k=st.integers(0, 25))
def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids(values: list[int], k: int) -> None:
    keep = top_k_mask(rows([float(value) for value in values]), [k])[0]
    best = sorted(range(len(values)), key=lambda token: (-values[token], token))
    expected = best[:k] if k else best
    assert np.flatnonzero(keep).tolist() == sorted(expected)


def test_top_probabilities_are_sorted_and_of_equals_the_lowest_id_comes_first() -> None:
    ids, probabilities = top_probabilities(rows([0, 1, 0, 1, 0], [5, 4, 3, 2, -INF]), 3)
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert (np.diff(probabilities) <= 0).all()


def test_many_equal_probabilities_come_in_the_order_of_their_ids() -> None:
    values = [float(token % 3) for token in range(1000)]
    ids, _ = top_probabilities(rows(values), 500)
    assert ids[0].tolist() == [*range(2, 1000, 3), *range(1, 1000, 3)][:500]


def test_top_probabilities_beyond_the_vocabulary_are_all_of_them() -> None:
    ids, probabilities = top_probabilities(rows([0, 1]), 8)
    assert ids.tolist() == [[1, 0]]
    assert probabilities.sum() == pytest.approx(1)


def test_no_top_probabilities_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        top_probabilities(rows([0, 1]), 0)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "must be 0 .* or a positive number"),
        ("temperature", NAN, "must be 0"),
        ("temperature", INF, r"up to 3.4e\+38"),
        ("temperature", 1e39, r"up to 3.4e\+38"),
        ("temperature", "1", "must be 0"),
        ("top_k", -1, "a whole number, 0"),
        ("top_k", 1.5, "a whole number, 0"),
        ("top_k", True, "a whole number, 0"),
        ("top_p", -0.01, "from 0 to 1"),
        ("top_p", 1.01, "from 0 to 1"),
        ("top_p", NAN, "from 0 to 1"),
        ("top_p", None, "from 0 to 1"),
        ("seed", -1, r"from 0 to 2\*\*64 - 1"),
        ("seed", 2**64, r"from 0 to 2\*\*64 - 1"),
        ("seed", 0.0, r"from 0 to 2\*\*64 - 1"),
    ],
)
def test_an_impossible_value_is_refused_with_what_is_allowed(
    field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(RequestError, match=f"^{field} is .*{allowed}"):
        SamplingParams(**{field: value})


def test_all_impossible_values_are_named_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature=-1, top_k=-2, top_p=3, seed=-4)
    for text in ("temperature is -1", "top_k is -2", "top_p is 3", "seed is -4"):
        assert text in str(caught.value)


def test_values_at_the_ends_of_their_ranges_are_allowed() -> None:
    largest = float(np.finfo(np.float32).max)
    SamplingParams(temperature=largest, top_k=10**12, top_p=0, seed=2**64 - 1)
    SamplingParams(temperature=0, top_k=0, top_p=1, seed=0)


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
    copy = logits.copy()
    sample(logits, [SamplingParams(temperature=1.0, top_k=3, top_p=0.5)] * 2, [0, 1])
    np.testing.assert_array_equal(logits, copy)
