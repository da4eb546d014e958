"""Native kernels sum in one order: the same bits by any threads, and for any few rows.

Up to eight rows meet a matrix at a time that are summed alike however many they are; more are
summed in blocks. So the laws are of eight tokens in all: rows, or tokens of a row, or both.
"""

from typing import Any

import numpy as np
import pytest

from export_grok.engines.ort import graphs as graphs_module
from export_grok.engines.ort.session import OrtSession, open_engine
from tests.bundles import BundleOf
from tests.conftest import Golden, load_golden
from tests.engines.ort.conftest import OpenedOf
from tests.engines.ort.logits import (
    Floats,
    Ints,
    at,
    decoded,
    fed,
    filled,
    last_logits,
    prefilled,
    tokens_of,
)

# ONNX Runtime's cosine is another for one or two numbers than for four: a token of deep13, with
# its head size of 4, is turned otherwise alone than beside another. Its laws are those of threads.
NAMES = ["tiny", "tiny8"]
ROWS = 8


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ONNX Runtime pack the float32 head, which is left to it.

    Unpacked it multiplies a single row by it in another order than several.
    """
    options = graphs_module.session_options

    def with_packing(*arguments: Any, **_packing: bool) -> Any:
        made = options(*arguments)
        made.add_session_config_entry("session.disable_prepacking", "0")
        return made

    monkeypatch.setattr(graphs_module, "session_options", with_packing)


def prompts(name: str) -> Ints:
    """Return eight rows of twelve tokens, no two alike."""
    tokens = tokens_of(load_golden(name)).ravel()
    return np.stack([np.roll(tokens, -3 * row)[:12] for row in range(ROWS)])


def opened(bundle_of: BundleOf, name: str, rows: int) -> OrtSession:
    return filled(open_engine(bundle_of(name), batch=rows, max_length=40), np.nan)


def begun(session: OrtSession, tokens: Ints, delays: Ints) -> Floats:
    """Decode the rows, each from a step of its own on: logits [B, steps, V].

    Until then a row writes its first token again and again.
    """
    rows = np.arange(len(tokens))
    steps = []
    for step in range(tokens.shape[1]):
        start = np.maximum(step - delays, 0)
        new = tokens[rows, start][:, None]
        steps.append(last_logits(session, new, start, at(len(tokens), 0)))
    return np.stack(steps, axis=1)


@pytest.mark.usefixtures("isa", "packed")
@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_decode_step_has_the_same_bits_alone_and_with_others(
    bundle_of: BundleOf, name: str
) -> None:
    tokens, delays = prompts(name), np.array([0, 3, 1, 0, 7, 2, 0, 5])
    together = begun(opened(bundle_of, name, ROWS), tokens, delays)
    for chosen in ([0], [4], [6, 1], [7, 2, 5], [5, 0, 2, 1, 4, 6, 3]):
        session = opened(bundle_of, name, len(chosen))
        fewer = begun(session, tokens[chosen], delays[chosen])
        assert (fewer == together[chosen]).all(), chosen


@pytest.mark.usefixtures("isa", "packed")
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_beside_a_much_longer_one(bundle_of: BundleOf, name: str) -> None:
    # Attention takes a long cache in pieces, as many as the longest row needs.
    start, random = np.array([3, 1200, 511, 512]), np.random.default_rng(0)
    tokens = prompts(name)[:4, :1]
    long = [open_engine(bundle_of(name), batch=rows, max_length=1300) for rows in (4, 1)]
    together, alone = long
    for array in (*together.keys, *together.values):
        array[:] = random.standard_normal(array.shape)
    kept = [array.copy() for array in (*together.keys, *together.values)]
    logits = last_logits(together, tokens, start, at(4, 0))
    for row in range(4):
        for array, cache in zip((*alone.keys, *alone.values), kept, strict=True):
            array[:] = cache[row]
        one = last_logits(alone, tokens[[row]], start[[row]], at(1, 0))
        assert (one[0] == logits[row]).all(), row


@pytest.mark.parametrize("name", NAMES)
def test_two_rows_or_more_have_the_same_bits_without_packing_too(
    opened_by: OpenedOf, name: str
) -> None:
    tokens, none = prompts(name), at(ROWS, 0)
    together = begun(opened_by(name, ROWS, 40), tokens, none)
    for chosen in ([6, 1], [7, 2, 5], [3, 2, 1, 0]):
        fewer = begun(opened_by(name, len(chosen), 40), tokens[chosen], none[chosen])
        assert (fewer == together[chosen]).all(), chosen


@pytest.mark.usefixtures("isa", "packed")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "chunk"), [(1, 2), (1, 5), (1, 8), (2, 3), (2, 4), (4, 2)])
def test_a_prompt_in_chunks_of_up_to_eight_tokens_has_the_bits_of_single_steps(
    bundle_of: BundleOf, name: str, rows: int, chunk: int
) -> None:
    tokens = prompts(name)[:rows]
    session = opened(bundle_of, name, rows)
    chunks = prefilled(session, tokens, chunk=chunk)
    caches = [array.copy() for array in (*session.keys, *session.values)]
    steps = prefilled(filled(session, np.nan), tokens, chunk=1)
    assert (chunks == steps).all()
    for cache, array in zip(caches, (*session.keys, *session.values), strict=True):
        assert (cache[:, :, : tokens.shape[1]] == array[:, :, : tokens.shape[1]]).all()


@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_any_number_of_threads_gives_the_same_bits(
    golden: Golden, opened_by: OpenedOf, chunk: int
) -> None:
    def answer(threads: int) -> Floats:
        session = opened_by(golden.name, 2, 40, threads)
        tokens = tokens_of(golden)
        prompt = prefilled(session, tokens, chunk=chunk)
        return np.concatenate([prompt, decoded(session, fed(golden), after=tokens.shape[1])], 1)

    one = answer(1)
    for threads in (2, 3):
        assert (answer(threads) == one).all()
