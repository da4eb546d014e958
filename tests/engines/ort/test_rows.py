"""One answer, whatever way it was computed: rows together or alone, chunks, any cache."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_grok.engines.backend import open_session
from export_grok.engines.ort.session import OrtSession
from tests.bundles import BundleOf
from tests.conftest import Golden, load_golden
from tests.engines.ort.conftest import OpenedOf
from tests.engines.ort.logits import (
    SAME,
    TOLERANCE,
    Floats,
    Ints,
    at,
    decoded,
    distance,
    filled,
    last_logits,
    prefilled,
    tokens_of,
)

NAMES = ["tiny", "tiny8", "deep13"]


def mixed(golden_name: str) -> tuple[list[Ints], Ints]:
    """Return prompts of 9, 2 and 5 tokens and what each is continued with, [3, 4]."""
    tokens = tokens_of(load_golden(golden_name))
    prompts = [tokens[0, :9], tokens[1, :2], tokens[1, 3:8]]
    return prompts, np.stack([tokens[0, 9:13], tokens[1, 9:13], tokens[0, 2:6]])


def run_mixed(session: OrtSession, prompts: list[Ints], continued: Ints) -> Floats:
    """Run rows of different length together, padded on the right: logits [B, 1 + steps, V]."""
    length = np.array([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), length.max()), np.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    rows = len(prompts)
    parts = [last_logits(session, padded, at(rows, 0), length - 1)]
    for step, column in enumerate(continued.T):
        parts.append(last_logits(session, column[:, None].copy(), length + step, at(rows, 0)))
    return np.stack(parts, axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_mixed_length_are_what_they_are_alone(
    opened: OpenedOf, kernels: str, name: str
) -> None:
    prompts, continued = mixed(name)
    together = run_mixed(filled(opened(name, 3, 24), np.nan), prompts, continued)
    for row, prompt in enumerate(prompts):
        session = filled(opened(name, 1, 24), 1e4)
        alone = run_mixed(session, [prompt], continued[row : row + 1])[0]
        # Native kernels sum many rows in another order than few; see test_bits.py. So do the
        # batched products of a function body, by which the attention of deep13 is computed.
        if kernels == "native" or name == "deep13":
            assert np.abs(together[row] - alone).max() < SAME
        else:
            assert (together[row] == alone).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [1e4, -1e4, np.inf, np.nan])
def test_what_the_cache_held_beyond_a_row_changes_nothing(
    opened: OpenedOf, name: str, poison: float
) -> None:
    prompts, continued = mixed(name)
    session = opened(name, 3, 24)
    clean = run_mixed(filled(session, 0.0), prompts, continued)
    assert np.isfinite(clean).all()
    assert (run_mixed(filled(session, poison), prompts, continued) == clean).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_length_of_the_cache_changes_nothing(
    opened: OpenedOf, kernels: str, name: str
) -> None:
    prompts, continued = mixed(name)
    exact = run_mixed(filled(opened(name, 3, 13), 0.0), prompts, continued)
    roomy = run_mixed(filled(opened(name, 3, 40), 0.0), prompts, continued)
    if kernels == "native":  # they look at what is live of a cache, and at nothing else
        assert (exact == roomy).all()
    assert np.abs(exact - roomy).max() < SAME


# A session may be used again: what its cache holds does not matter.
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_cut_of_a_prompt_into_chunks_gives_the_same_logits(
    opened: OpenedOf, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["tiny", "tiny8"]))
    tokens = tokens_of(load_golden(name))
    length = tokens.shape[1]
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=5)))
    session = filled(opened(name, 2, 64), np.nan)
    parts = [
        session.forward_all(tokens[:, first:end], at(2, first))
        for first, end in zip([0, *cuts], [*cuts, length], strict=True)
    ]
    whole = load_golden(name).arrays["f32/prefill_logits"]
    assert np.abs(np.concatenate(parts, axis=1) - whole).max() < TOLERANCE


def test_two_decode_steps_are_one_prefill_of_both_tokens(golden: Golden, opened: OpenedOf) -> None:
    tokens = tokens_of(golden)
    session = filled(opened(golden.name, 2, golden.config.sequence_len), 0.0)
    prefilled(session, tokens[:, :-2], chunk=100)
    together = session.forward_all(tokens[:, -2:], at(2, tokens.shape[1] - 2))
    filled(session, 0.0)
    prefilled(session, tokens[:, :-2], chunk=100)
    singly = decoded(session, tokens[:, -2:], after=tokens.shape[1] - 2)
    assert np.abs(together - singly).max() < SAME


def test_the_head_of_one_token_is_a_row_of_the_head_of_all(
    golden: Golden, opened: OpenedOf
) -> None:
    tokens = tokens_of(golden)
    session = filled(opened(golden.name, 2, golden.config.sequence_len), 0.0)
    every = session.forward_all(tokens, at(2, 0))
    last = np.array([3, tokens.shape[1] - 1])
    assert session.forward(tokens, at(2, 0), None) is None
    one = last_logits(session, tokens, at(2, 0), last)
    assert np.abs(one - every[[0, 1], last]).max() < SAME


def test_logits_that_were_given_out_stay_as_they_are(opened: OpenedOf) -> None:
    tokens = tokens_of(load_golden("tiny"))
    session = opened("tiny", 2, 64)
    first = session.forward_all(tokens, at(2, 0))
    kept = first.copy()
    session.forward_all(tokens[:, ::-1], at(2, 0))
    assert (first == kept).all()


def test_tokens_may_come_in_any_memory_layout(opened: OpenedOf) -> None:
    session, tokens = opened("tiny", 2, 32), tokens_of(load_golden("tiny"))[:, :4]
    wanted = last_logits(session, tokens, at(2, 0), np.array([1, 3]))
    strided = np.array([1, 0, 3, 0])[::2]
    assert (last_logits(session, tokens, at(2, 0), strided) == wanted).all()
    narrow: Any = np.array([1, 3], np.int32)
    assert (last_logits(session, tokens[:, ::-1][:, ::-1], at(2, 0), narrow) == wanted).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("threads", [1, 2, None])
def test_the_number_of_threads_does_not_matter(bundle_of: BundleOf, threads: int | None) -> None:
    golden = load_golden("tiny")
    session = open_session(bundle_of("tiny"), batch=2, max_length=64, threads=threads)
    assert isinstance(session, OrtSession)
    assert distance(session, golden) < TOLERANCE
