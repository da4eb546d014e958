"""Laws of a model on a real engine: a request gets what it gets alone, whatever else goes on.

Which calls a token is computed in depends on who else is there, and sums over more rows are
rounded in another order. So tokens are held to be the same where they are not open to the last
bits of the logits: see `scripts.soaking.compare`.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_grok.engines.backend import RowSession
from export_grok.engines.ort.session import OrtSession, open_engine
from export_grok.errors import RequestError
from export_grok.runtime import GenerationParams, Handle, Result, load
from export_grok.runtime.observer import Load
from export_grok.runtime.sampling.draw import sample
from scripts.soaking.compare import SHAKE, Parted, was_open
from tests.bundles import BundleOf
from tests.runtime.fake_model import model_of

NAME, LENGTH, VOCABULARY = "tiny", 64, 512
PATIENCE = 60.0
# Rows and chunk of the models that requests share.
SHARED = ((2, 16), (3, 256), (8, 5))

Prompt = tuple[int, ...]


class Models:
    """Models of one bundle, loaded once: one for requests alone, and those that are shared."""

    def __init__(self, bundle_of: BundleOf, opened: ExitStack) -> None:
        folder = bundle_of(NAME).folder
        self.single = opened.enter_context(load(folder, batch=1))
        self.shared = {
            batch: opened.enter_context(load(folder, batch=batch, chunk=chunk))
            for batch, chunk in SHARED
        }
        self.session: RowSession = open_engine(bundle_of(NAME), batch=1, max_length=LENGTH)

    def alone(self, prompt: Prompt, params: GenerationParams) -> Result:
        return self.single.generate([prompt], params)[0]

    def same(self, result: Result, alone: Result, params: GenerationParams) -> bool:
        """Return whether tokens are those alone, to where one was open or the answer broke off."""
        for made, (one, other) in enumerate(zip(alone.tokens, result.tokens, strict=False)):
            if one != other:
                prefix = (*result.prompt_tokens, *result.tokens[:made])
                return was_open(Parted(prefix, made, other, params), self.session)
        if result.finish_reason == "cancelled":
            return len(result.tokens) <= len(alone.tokens)
        ends = (result.finish_reason, len(result.tokens))
        return ends == (alone.finish_reason, len(alone.tokens))

    def firm(self, alone: Result, params: GenerationParams) -> bool:
        """Return whether no choice of an answer is open to the last bits."""
        tokens = np.array([[*alone.prompt_tokens, *alone.tokens]], np.int64)
        logits = self.session.forward_all(tokens, np.zeros(1, np.int64))[0]
        random = np.random.default_rng(0)
        for made, token in enumerate(alone.tokens):
            x = logits[[len(alone.prompt_tokens) - 1 + made]]
            for _ in range(50):
                shaken = x + random.uniform(-SHAKE, SHAKE, x.shape).astype(np.float32)
                if sample(shaken, [params], [made])[0] != token:
                    return False
        return True


@pytest.fixture(scope="module")
def models(bundle_of: BundleOf) -> Iterator[Models]:
    with ExitStack() as opened:
        yield Models(bundle_of, opened)


def prompt_of(length: int, seed: int = 0) -> Prompt:
    random = Random(seed)
    return tuple(random.randrange(VOCABULARY) for _ in range(length))


def is_idle(load: Load) -> bool:
    return (load.running, load.waiting, load.cache_tokens) == (0, 0, 0)


def came(handle: Handle, tokens: int) -> None:
    """Wait for so many tokens, or for the end; not for ever, as a row that is lost would have."""
    patience = time.monotonic() + PATIENCE
    while handle.usage.new_tokens < tokens and not handle.done:
        assert time.monotonic() < patience
        time.sleep(0.0005)


# Any mix.


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request of a mix.

    Attributes:
        behind: tokens of the request before that are waited for until this one comes.
        cancelled: behind so many of its own; None for never.
    """

    prompt: Prompt
    params: GenerationParams
    behind: int
    cancelled: int | None


lengths = st.one_of(st.integers(1, 8), st.integers(1, LENGTH - 1))
prompts = st.builds(
    lambda length, seed, shared: (prompt_of(20)[:shared] + prompt_of(length, seed))[: LENGTH - 1],
    lengths,
    st.integers(0, 9),
    st.sampled_from((0, 0, 5, 20)),
)
params = st.builds(
    GenerationParams,
    temperature=st.sampled_from((0.0, 0.7, 1.5)),
    top_k=st.sampled_from((0, 20)),
    top_p=st.sampled_from((1.0, 0.8)),
    repetition_penalty=st.sampled_from((1.0, 1.3)),
    seed=st.integers(0, 9),
    logprobs=st.sampled_from((None, 2)),
    max_new_tokens=st.sampled_from((1, 3, 12, None)),
    ignore_eos=st.booleans(),
)
mixes = st.lists(
    st.builds(
        Asked,
        prompts,
        params,
        st.integers(0, 4),
        st.one_of(st.none(), st.none(), st.integers(0, 6)),
    ),
    min_size=1,
    max_size=9,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mix=mixes, batch=st.sampled_from([batch for batch, _ in SHARED]))
def test_any_mix_gives_each_request_what_it_gets_alone(
    models: Models, mix: list[Asked], batch: int
) -> None:
    model = models.shared[batch]
    handles: list[Handle] = []
    for asked in mix:
        if handles:
            came(handles[-1], asked.behind)
        handles.append(model.submit(asked.prompt, asked.params))
    for asked, handle in zip(mix, handles, strict=True):
        if asked.cancelled is not None:
            came(handle, asked.cancelled)
            handle.cancel()
    for asked, handle in zip(mix, handles, strict=True):
        result = handle.result(timeout=PATIENCE)
        assert models.same(result, models.alone(asked.prompt, asked.params), asked.params)
        assert [piece.token for piece in handle if piece.token is not None] == [*result.tokens]
        assert result.prompt_tokens == asked.prompt
        assert (result.logprobs is None) == (asked.params.logprobs is None)
    assert is_idle(model.current_load())


def test_logprobs_do_not_depend_on_who_else_is_there(models: Models) -> None:
    asked = GenerationParams(max_new_tokens=6, logprobs=0, ignore_eos=True)
    prompts = [prompt_of(length, length) for length in (1, 7, 60, 20, 33, 2, 58, 15)]
    for order in (prompts, prompts[::-1]):
        together = models.shared[8].generate(order, asked)
        for prompt, result in zip(order, together, strict=True):
            alone = models.alone(prompt, asked)
            assert alone.logprobs is not None
            assert result.logprobs is not None
            pairs = zip(alone.logprobs, result.logprobs, strict=True)
            assert max(abs(one.logprob - other.logprob) for one, other in pairs) < SHAKE


# The same seed.


@pytest.mark.parametrize("batch", [batch for batch, _ in SHARED])
def test_a_seed_gives_the_same_answer_alone_and_among_others(models: Models, batch: int) -> None:
    prompt = prompt_of(9)
    chosen = []
    for seed in range(50):  # without those where a choice is open to the last bits
        asked = GenerationParams(temperature=1.0, seed=seed, max_new_tokens=12, ignore_eos=True)
        alone = models.alone(prompt, asked)
        if models.firm(alone, asked):
            chosen.append((asked, alone.tokens))
        if len(chosen) == 4:
            break
    tokens = [tokens for _, tokens in chosen]
    assert len(set(tokens)) == 4
    others = [prompt_of(5 + 7 * n, n) for n in range(1, 5)]
    each = [chosen[0][0]] * 4 + [asked for asked, _ in chosen]
    results = models.shared[batch].generate([*others, *[prompt] * 4], each)
    assert [result.tokens for result in results[4:]] == tokens


# The end of an answer.


def test_an_answer_that_ended_stays_ended_and_the_others_go_on(models: Models) -> None:
    eos = models.single.config.eos_token
    ends = GenerationParams(temperature=1.0, logit_bias={eos: 6.0}, max_new_tokens=30)
    goes_on = GenerationParams(logit_bias={eos: -np.inf}, max_new_tokens=40)
    short, long = prompt_of(5), prompt_of(6, 1)
    early = next(
        asked
        for asked in (dataclasses.replace(ends, seed=seed) for seed in range(50))
        if 2 <= len(models.alone(short, asked).tokens) <= 10
    )
    assert models.alone(short, early).finish_reason == "stop"
    other, one = (
        models.shared[2].submit(long, goes_on),
        models.shared[2].submit(short, early),
    )
    pieces = list(one)
    assert models.same(one.result(), models.alone(short, early), early)
    assert one.finish_reason == "stop"
    assert eos not in one.result().tokens
    result = other.result()
    assert (len(result.tokens), result.finish_reason) == (40, "length")
    assert models.same(result, models.alone(long, goes_on), goes_on)
    assert list(one) == pieces


@pytest.mark.parametrize(("tokens", "new"), [(LENGTH - 2, 2), (LENGTH - 1, 1)])
def test_a_row_that_is_full_ends_and_its_neighbours_go_on(
    models: Models, tokens: int, new: int
) -> None:
    params = GenerationParams(ignore_eos=True)
    model, prompts = models.shared[3], [prompt_of(20, 1), prompt_of(tokens, 2), prompt_of(30, 3)]
    results = model.generate(prompts, params)
    assert [len(result.tokens) for result in results] == [LENGTH - 20, new, LENGTH - 30]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.finish_reason == "length"
        assert models.same(result, models.alone(prompt, params), params)


@pytest.mark.parametrize("tokens", [LENGTH, LENGTH + 1])
def test_a_prompt_that_leaves_no_room_is_refused_and_the_next_is_right(
    models: Models, tokens: int
) -> None:
    params = GenerationParams(max_new_tokens=3)
    with pytest.raises(RequestError, match=f"the prompt has {tokens} tokens; a cache of {LENGTH}"):
        models.shared[3].generate([prompt_of(tokens)], params)
    assert is_idle(models.shared[3].current_load())
    (result,) = models.shared[3].generate([prompt_of(4)], params)
    assert models.same(result, models.alone(prompt_of(4), params), params)


# Cancelling, and rows used again.


def test_a_thousand_that_are_cancelled_leave_the_load_and_the_next_answer_as_they_were(
    models: Models,
) -> None:
    model, random = models.shared[2], Random(0)
    params = GenerationParams(ignore_eos=True)
    under_way: list[Handle] = []
    for number in range(1000):
        under_way.append(model.submit(prompt_of(random.randint(1, 20), number), params))
        if len(under_way) == 4:
            for handle in random.sample(under_way, 3):
                if random.random() < 0.2:
                    came(handle, random.randint(1, 4))
                handle.cancel()
                under_way.remove(handle)
                assert handle.result(timeout=PATIENCE).finish_reason in ("cancelled", "length")
    for handle in under_way:
        handle.cancel()
        handle.result(timeout=PATIENCE)
    assert is_idle(model.current_load())
    (result,) = model.generate([prompt_of(30)], params)
    assert models.same(result, models.alone(prompt_of(30), params), params)


def test_what_rows_held_before_reaches_no_answer(bundle_of: BundleOf, models: Models) -> None:
    session = open_engine(bundle_of(NAME), batch=3, max_length=LENGTH)
    params = GenerationParams(max_new_tokens=8, logprobs=0, ignore_eos=True)
    poison(session)
    with model_of(bundle_of(NAME), session, chunk=16) as model:
        for turn in range(3):
            # No two prompts begin with the same token: nothing that is held is to be used.
            prompts = [(100 * turn + n, *prompt_of(9 * n, n)) for n in range(1, 7)]
            results = model.generate(prompts, params)
            poison(session)
            for prompt, result in zip(prompts, results, strict=True):
                assert models.same(result, models.alone(prompt, params), params)


def poison(session: OrtSession) -> None:
    for array in (*session.keys, *session.values):
        array[:] = np.nan
