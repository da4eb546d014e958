"""What rows do to each other, and what a row's past does to it: nothing but the order of sums.

Reports behind these laws: exllamav2#200, mlx-vlm#1543, unsloth#3699, TransformerLens#1005 (padding
changes answers), vllm#2163 (a prompt in chunks is another than in one).
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.config import ExportOptions
from export_grok.engines.ort import session as session_module
from export_grok.engines.ort.chains import Chain, Chains, Span, Workspace
from export_grok.engines.ort.places import Places
from export_grok.engines.ort.session import OrtSession, open_engine
from export_grok.engines.pipeline import engine_from_source
from tests.conftest import DATA
from tests.engines.ort.conftest import OpenedOf
from tests.engines.ort.logits import Floats, Ints, filled

# Of the largest logit, between ways through one engine: docs/fidelity.md, "What a neighbour
# changes".
SAME = {"native": 2e-5, "builtin": 1e-4}
NAMES = ["tiny", "tiny8", "demo"]
LENGTH = 104
LENGTHS = (1, 7, 64)
STEPS = 4

Bits = list[NDArray[np.uint32]]


def fresh(session: OrtSession, value: float) -> OrtSession:
    """Return a session as if it had just been opened, but for what its caches are filled with."""
    session._places = Places(session.batch)
    return filled(session, value)


def tokens_for(session: OrtSession, *lengths: int, seed: int = 0) -> list[Ints]:
    """Return tokens of so many rows, each of a length."""
    random = np.random.default_rng(seed)
    return [random.integers(3, session.config.vocab_size, length) for length in lengths]


def fed(
    session: OrtSession, rows: list[int], tokens: list[Ints], *, chunk: int, start: int = 0
) -> Floats:
    """Write tokens into rows, padded to the longest; return the logits of each one's last [R, V].

    A row that has no more tokens is named no more.
    """
    logits = np.empty((len(rows), session.config.vocab_size), np.float32)
    lengths = [len(row) for row in tokens]
    for first in range(0, max(lengths), chunk):
        going = [index for index, length in enumerate(lengths) if length > first]
        width = min(chunk, max(lengths) - first)
        new = np.zeros((len(going), width), np.int64)
        for place, index in enumerate(going):
            part = tokens[index][first : first + width]
            new[place, : len(part)] = part
        last = np.array([min(lengths[index] - first, width) - 1 for index in going])
        found = session.forward(
            new, np.full(len(going), start + first), last, np.array([rows[i] for i in going])
        )
        assert found is not None
        logits[going] = found
    return logits


def answered(
    session: OrtSession, rows: list[int], prompts: list[Ints], new: list[Ints], *, chunk: int = 256
) -> Floats:
    """Run prompts and what each is continued with: logits [R, 1 + steps, V]."""
    parts = [fed(session, rows, prompts, chunk=chunk)]
    for step in range(len(new[0])):
        logits = session.forward(
            np.array([[tokens[step]] for tokens in new]),
            np.array([len(prompt) + step for prompt in prompts]),
            np.zeros(len(rows), np.int64),
            np.array(rows),
        )
        assert logits is not None
        parts.append(logits)
    return np.stack(parts, axis=1)


def apart(found: Floats, wanted: Floats) -> float:
    """Return the largest difference, of the largest logit; infinite where there is no number."""
    distance = np.nan_to_num(np.abs(found - wanted), nan=np.inf).max()
    return float(distance / np.abs(wanted).max())


def same(found: Floats, wanted: Floats) -> bool:
    return found.tobytes() == wanted.tobytes()


def held(session: OrtSession, row: int, length: int = LENGTH) -> Bits:
    """Return the bits of a row's keys and values in all layers, wherever it lies."""
    place = session._places.of(row)
    return [
        cache[place, :, :length].view(np.uint32).copy()
        for cache in (*session.keys, *session.values)
    ]


def equal(found: Bits, wanted: Bits) -> bool:
    return all((one == other).all() for one, other in zip(found, wanted, strict=True))


# ---- rows together


@pytest.mark.parametrize("chunk", [256, 16])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_1_7_and_64_tokens_together_say_what_each_says_alone(
    opened: OpenedOf, kernels: str, name: str, chunk: int
) -> None:
    session = fresh(opened(name, 4, LENGTH), np.nan)
    prompts = tokens_for(session, *LENGTHS)
    new = tokens_for(session, *[STEPS] * 3, seed=1)
    together = answered(session, [0, 1, 2], prompts, new, chunk=chunk)
    for row in range(3):
        fresh(session, np.nan)
        alone = answered(session, [row], [prompts[row]], [new[row]], chunk=chunk)
        assert apart(alone[0], together[row]) <= SAME[kernels]


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_changes_no_bit(opened: OpenedOf, name: str) -> None:
    session = fresh(opened(name, 4, LENGTH), np.nan)
    prompts = tokens_for(session, *LENGTHS)
    new = tokens_for(session, *[STEPS] * 3, seed=1)
    wanted = answered(session, [0, 1, 2], prompts, new)
    for order, rows in (([2, 0, 1], [0, 1, 2]), ([1, 2, 0], [3, 0, 2]), ([0, 1, 2], [2, 3, 1])):
        fresh(session, np.nan)
        found = answered(session, rows, [prompts[i] for i in order], [new[i] for i in order])
        assert same(found, wanted[order])


@pytest.mark.parametrize("name", NAMES)
def test_a_step_computes_the_rows_that_are_named_and_no_other(
    opened: OpenedOf, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(name, 4, LENGTH)
    spans: list[Span] = []
    chain_of = Chains.of

    def noted(chains: Chains, span: Span, make: Callable[[Span, Workspace], Chain]) -> Chain:
        spans.append(span)
        return chain_of(chains, span, make)

    monkeypatch.setattr(Chains, "of", noted)
    for rows in ([3], [2, 0], [1, 3, 0]):
        fed(session, rows, tokens_for(session, *[5] * len(rows)), chunk=8)
    assert [(span.rows, span.tokens) for span in spans] == [(1, 5), (2, 5), (3, 5)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [np.nan, 1e4])
def test_a_row_that_is_not_named_keeps_every_bit(
    opened: OpenedOf, name: str, poison: float
) -> None:
    session = fresh(opened(name, 4, LENGTH), poison)
    prompts = tokens_for(session, 30, 9, 17, 24)
    fed(session, [0, 1, 2, 3], prompts, chunk=256)
    # Side by side nothing moves, and all that an idle row lies in must stay, whatever it is.
    whole = [held(session, row) for row in range(4)]
    fed(session, [2, 1], tokens_for(session, 11, 12, seed=2), chunk=8)
    fed(session, [1, 2], tokens_for(session, 1, 1, seed=3), chunk=8, start=11)
    for row in (0, 3):
        assert equal(held(session, row), whole[row])
    # Apart they move: what an idle row was given must stay.
    beside = held(session, 1, 12)
    fed(session, [0, 2], tokens_for(session, 40, 2, seed=4), chunk=16)
    fed(session, [0, 2], tokens_for(session, 1, 1, seed=5), chunk=1, start=2)
    assert equal(held(session, 1, 12), beside)
    assert equal(held(session, 3, 24), [bits[:, :24] for bits in whole[3]])


def test_the_check_sees_rows_that_were_not_moved(
    opened: OpenedOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_swap", lambda cache, swap: None)
    session = fresh(opened("tiny", 4, LENGTH), 0.0)
    fed(session, [0, 1, 2, 3], tokens_for(session, 30, 9, 17, 24), chunk=256)
    whole = [held(session, row, 9) for row in range(4)]
    fed(session, [0, 2], tokens_for(session, 1, 1), chunk=1, start=9)
    assert not all(equal(held(session, row, 9), whole[row]) for row in (1, 3))


@pytest.mark.usefixtures("native", "traced_once")
def test_with_an_int8_head_up_to_eight_tokens_at_a_time_have_the_bits_of_each_row_alone(
    tmp_path: Path,
) -> None:
    options = ExportOptions(head="int8")
    bundle = engine_from_source(DATA / "tiny8", tmp_path, backend="ort", options=options)
    many, alone = (open_engine(bundle, batch=rows, max_length=40, threads=1) for rows in (8, 1))
    prompts = tokens_for(many, 3, 17, 1, 9, 30, 2, 5, 8)
    new = tokens_for(many, *[STEPS] * 8, seed=1)
    together = answered(many, list(range(8)), prompts, new, chunk=1)
    pair = answered(many, [5, 1], [prompts[1], prompts[6]], [new[1], new[6]], chunk=4)
    for row in range(8):
        found = answered(alone, [0], [prompts[row]], [new[row]], chunk=8)[0]
        assert same(found, together[row])
    assert same(pair, together[[1, 6]])


# ---- chunks


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_100_tokens_whole_in_7s_and_in_1s_says_the_same(
    opened: OpenedOf, kernels: str, name: str
) -> None:
    session = opened(name, 4, LENGTH)
    (prompt,) = tokens_for(session, 100)
    (new,) = tokens_for(session, STEPS, seed=1)
    found = {
        chunk: answered(fresh(session, np.nan), [2], [prompt], [new], chunk=chunk)
        for chunk in (100, 7, 1)
    }
    assert apart(found[7], found[100]) <= SAME[kernels]
    assert apart(found[1], found[100]) <= SAME[kernels]
    if kernels == "native":  # up to eight tokens meet a matrix in one order of sums
        assert same(found[7], found[1])
    else:  # attention sums one token's scores in another order than several
        assert same(found[7], found[100])


# ---- a row's past


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [np.nan, 1e4, None])
def test_a_row_that_is_used_again_after_a_longer_request_is_as_new(
    opened: OpenedOf, name: str, poison: float | None
) -> None:
    session = fresh(opened(name, 4, LENGTH), 0.0)
    prompt, longer = tokens_for(session, 7, 90)
    new, others = tokens_for(session, STEPS, STEPS, seed=1)
    wanted = answered(session, [2], [prompt], [new])
    if poison is None:
        answered(session, [2, 0], [longer, prompt], [others, new], chunk=32)
    else:
        filled(session, poison)
    assert same(answered(session, [2], [prompt], [new]), wanted)


# ---- copies


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 20, 64])
def test_a_copied_beginning_goes_on_as_if_it_had_been_computed_there(
    opened: OpenedOf, name: str, length: int
) -> None:
    session = fresh(opened(name, 4, LENGTH), np.nan)
    prompt, other, rest, noise = tokens_for(session, 64, 64, 12, 50)
    shared = np.concatenate([prompt[:length], other[length:]])
    fed(session, [1], [shared], chunk=256)
    wanted = fed(session, [1], [rest], chunk=256, start=length)
    fresh(session, np.nan)
    fed(session, [0], [shared], chunk=256)
    fed(session, [3], [noise], chunk=256)
    fed(session, [1, 3], tokens_for(session, 50, 50), chunk=256)  # they move
    source = held(session, 0, 64)
    session.copy(0, 3, length)
    assert same(fed(session, [3], [rest], chunk=256, start=length), wanted)
    assert equal(held(session, 0, 64), source)


# ---- all of it at once


@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_after_any_calls_a_row_says_what_it_says_alone(
    opened: OpenedOf, kernels: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["tiny", "tiny8"]))
    session = fresh(opened(name, 4, 24), np.nan)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    texts: list[list[int]] = [[] for _ in range(4)]
    for _ in range(data.draw(st.integers(1, 8))):
        rows = data.draw(st.permutations(range(4)))
        copied: bool = data.draw(st.booleans())
        if texts[rows[0]] and copied:
            length = data.draw(st.integers(1, len(texts[rows[0]])))
            session.copy(rows[0], rows[1], length)
            texts[rows[1]] = texts[rows[0]][:length]
            continue
        rows = rows[: data.draw(st.integers(1, 4))]
        width: int = data.draw(st.sampled_from([1, 2, 9]))
        start = [data.draw(st.integers(0, min(len(texts[row]), 23 - width))) for row in rows]
        new = random.integers(3, session.config.vocab_size, (len(rows), width))
        session.forward(new, np.array(start), None, np.array(rows))
        for row, first, tokens in zip(rows, start, new.tolist(), strict=True):
            texts[row] = texts[row][:first] + tokens
    going = [row for row in data.draw(st.permutations(range(4))) if texts[row]]
    lengths = np.array([len(texts[row]) for row in going])
    token = np.full((len(going), 1), 5)
    zeros = np.zeros(len(going), np.int64)
    found = session.forward(token, lengths, zeros, np.array(going))
    assert found is not None
    alone = filled(opened(name, 1, 24), np.nan)
    for row, logits in zip(going, found, strict=True):
        whole = [np.array([*texts[row], 5])]
        assert apart(fed(alone, [0], whole, chunk=24)[0], logits) <= SAME[kernels]
