"""The decode loop: each answer is what its own prompt gives, whatever else shares the batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.engines.backend import RowSession, open_session
from export_grok.errors import NumericsError, RequestError
from export_grok.runtime.decode import Step, decode, teacher_forced
from export_grok.runtime.logits import write_logits
from export_grok.runtime.params import SamplingParams
from export_grok.runtime.request import Request
from export_grok.runtime.sampling.draw import sample
from tests.bundles import BundleOf
from tests.conftest import Golden, load_golden
from tests.runtime.fake_session import FakeSession, broken_after, logits_after
from tests.runtime.small_model import SMALL

TOLERANCE = 3e-4  # see tests/engines/ort/logits.py
SAME = 1e-4

SessionOf = Callable[[str, int, int], RowSession]


@pytest.fixture(scope="session")
def opened(bundle_of: BundleOf) -> SessionOf:
    """Return the way to a session. It is shared: what its cache holds must not matter."""

    @functools.cache
    def session(name: str, batch: int, max_length: int) -> RowSession:
        return open_session(bundle_of(name), batch=batch, max_length=max_length)

    return session


def fake(batch: int, max_length: int, **options: Any) -> FakeSession:
    return FakeSession(SMALL, batch=batch, max_length=max_length, **options)


def answers(steps: Sequence[Step], rows: int) -> list[tuple[list[int], str | None]]:
    """Return each row's tokens and why it ended; the order of the steps is checked."""
    tokens: list[list[int]] = [[] for _ in range(rows)]
    reasons: list[str | None] = [None] * rows
    for step in steps:
        assert reasons[step.row] is None, "a row goes on after its end"
        if step.token is None:
            assert step.finished == "stop"
        else:
            tokens[step.row].append(step.token)
        reasons[step.row] = step.finished
    return list(zip(tokens, reasons, strict=True))


def run(session: RowSession, requests: Sequence[Request], **options: Any) -> list[Any]:
    return answers(list(decode(session, requests, **options)), len(requests))


def expected(request: Request, max_length: int) -> tuple[list[int], str]:
    """Return the answer to one request, by the definition: one token after the other."""
    tokens = list(request.prompt)
    made: list[int] = []
    room = max_length - len(tokens)
    limit = room if request.max_new_tokens is None else min(room, request.max_new_tokens)
    while True:
        logits = logits_after(tokens, SMALL.vocab_size)[None]
        token = int(sample(logits, [request.sampling], [len(made)])[0])
        if token in request.stop:
            return made, "stop"
        made.append(token)
        tokens.append(token)
        if len(made) == limit:
            return made, "length"


def prompts_of(golden: Golden) -> list[tuple[int, ...]]:
    return [tuple(map(int, row)) for row in golden.arrays["tokens"]]


# The original's answers.


@pytest.mark.parametrize("chunk", [5, 128])
def test_greedy_answers_are_those_of_the_original(
    golden: Golden, opened: SessionOf, chunk: int
) -> None:
    session = opened(golden.name, 2, golden.config.sequence_len)
    requests = [Request(prompt=prompt, max_new_tokens=9) for prompt in prompts_of(golden)]
    found = run(session, requests, chunk=chunk)
    fed = golden.arrays["f32/decode_tokens"]
    after = golden.arrays["f32/decode_logits"][:, -1].argmax(-1)
    assert found == [
        ([*row.tolist(), int(last)], "length") for row, last in zip(fed, after, strict=True)
    ]


def test_a_stop_token_ends_the_original_answer_and_is_not_part_of_it(
    golden: Golden, opened: SessionOf
) -> None:
    session = opened(golden.name, 2, golden.config.sequence_len)
    fed = golden.arrays["f32/decode_tokens"].tolist()
    stops = [row[5] for row in fed]
    requests = [
        Request(prompt=prompt, max_new_tokens=8, stop=frozenset({stop}))
        for prompt, stop in zip(prompts_of(golden), stops, strict=True)
    ]
    assert run(session, requests) == [
        (row[: row.index(stop)], "stop") for row, stop in zip(fed, stops, strict=True)
    ]


SAMPLED = SamplingParams(temperature=1.3, top_k=50, top_p=0.95)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("name", ["tiny", "tiny8"])
def test_an_answer_alone_is_the_answer_in_a_batch_of_mixed_lengths(
    opened: SessionOf, name: str, temperature: float
) -> None:
    first, second = prompts_of(load_golden(name))
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=count,
            sampling=dataclasses.replace(SAMPLED, temperature=temperature, seed=seed),
        )
        for seed, (prompt, count) in enumerate([(first, 4), (second[:3], 12), (second[4:11], 9)])
    ]
    together = run(opened(name, 3, 40), requests)
    assert [len(tokens) for tokens, _ in together] == [4, 12, 9]
    for request, answer in zip(requests, together, strict=True):
        assert run(opened(name, 1, 40), [request]) == [answer]
        assert run(opened(name, 1, 33), [request], chunk=2) == [answer]
    backwards = run(opened(name, 3, 40), requests[::-1], chunk=4)
    assert backwards == together[::-1]


# Every answer by its definition, with a session whose logits follow from all tokens before.


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Request], int, int]:
    """Draw requests, the length of the cache, and that of a chunk."""
    max_length = draw(st.integers(2, 14))
    token = st.integers(0, SMALL.vocab_size - 1)
    requests = draw(
        st.lists(
            st.builds(
                Request,
                prompt=st.lists(token, min_size=1, max_size=max_length - 1).map(tuple),
                max_new_tokens=st.none() | st.integers(1, 15),
                stop=st.frozensets(token, max_size=2),
                sampling=st.builds(
                    SamplingParams,
                    temperature=st.sampled_from([0.0, 1.0]),
                    seed=st.integers(0, 9),
                ),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return requests, max_length, draw(st.integers(1, 16))


@settings(deadline=None, max_examples=200)
@given(batches())
def test_every_answer_is_that_of_its_own_prompt(
    batch: tuple[list[Request], int, int],
) -> None:
    requests, max_length, chunk = batch
    session = fake(len(requests), max_length)
    found = run(session, requests, chunk=chunk)
    assert found == [expected(request, max_length) for request in requests]
    assert max(session.calls) <= chunk


def test_a_session_that_was_used_before_gives_the_same_answers() -> None:
    requests = [Request(prompt=(1, 2, 3), max_new_tokens=4), Request(prompt=(4,))]
    session = fake(2, 10)
    assert run(session, requests) == run(session, requests)


class FakeOffByOne(FakeSession):
    """A fake with a planted mistake: decoded tokens land one slot too early."""

    def forward(self, tokens: Any, start: Any, last: Any, rows: Any = None) -> Any:
        if tokens.shape[1] == 1:
            start = np.maximum(start - 1, 0)
        return super().forward(tokens, start, last, rows)


class FakeNeighbour(FakeSession):
    """A fake with a planted mistake: the longest row's tokens reach into the others."""

    def _write(self, tokens: Any, start: Any, rows: Any) -> None:
        super()._write(tokens, start, rows)
        self.cache[:, 0] = self.cache[0, 0]


@pytest.mark.parametrize("mistaken", [FakeOffByOne, FakeNeighbour])
def test_the_check_sees_mistakes_of_a_session(mistaken: type[FakeSession]) -> None:
    requests = [Request(prompt=(1, 2, 3), max_new_tokens=6), Request(prompt=(4, 9))]
    wanted = [expected(request, 12) for request in requests]
    assert run(fake(2, 12), requests) == wanted
    assert run(mistaken(SMALL, batch=2, max_length=12), requests) != wanted


def test_tokens_come_row_by_row_within_a_step() -> None:
    requests = [Request(prompt=(row,), max_new_tokens=count) for row, count in ((1, 2), (2, 3))]
    steps = list(decode(fake(2, 9), requests))
    assert [step.row for step in steps] == [0, 1, 0, 1, 1]


def test_tokens_are_given_out_before_the_next_are_computed() -> None:
    session = fake(1, 9)
    stream = decode(session, [Request(prompt=(1, 2, 3))])
    next(stream)
    assert session.calls == [3]
    next(stream)
    assert session.calls == [3, 1]


# Limits.


@pytest.mark.parametrize("name", ["tiny", "deep13"])
def test_an_answer_fills_the_cache_to_its_last_slot(opened: SessionOf, name: str) -> None:
    first, second = prompts_of(load_golden(name))
    requests = [Request(prompt=first[:7]), Request(prompt=second[:11])]
    found = run(opened(name, 2, 16), requests)
    assert [(len(tokens), reason) for tokens, reason in found] == [(9, "length"), (5, "length")]


def test_a_prompt_may_leave_one_slot_but_not_none(opened: SessionOf) -> None:
    golden = load_golden("tiny")
    prompt = prompts_of(golden)[0]
    for session in (opened("tiny", 1, len(prompt) + 1), fake(1, 25)):
        ids = tuple(token % session.config.vocab_size for token in prompt)
        ((tokens, reason),) = run(session, [Request(prompt=ids)], chunk=5)
        assert (len(tokens), reason) == (1, "length")
        with pytest.raises(RequestError, match=r"prompt 0 has 25 tokens; a cache of 25") as error:
            run(session, [Request(prompt=(*ids, 1))])
        assert "\n" not in str(error.value)


def test_a_prompt_that_does_not_fit_is_named_by_its_number() -> None:
    with pytest.raises(RequestError, match="prompt 1 has 9 tokens; a cache of 4"):
        run(fake(2, 4), [Request(prompt=(1,)), Request(prompt=(1,) * 9)])


def test_one_token_may_be_asked_for() -> None:
    session = fake(2, 9)
    found = run(session, [Request(prompt=(row,), max_new_tokens=1) for row in (3, 4)])
    assert [(len(tokens), reason) for tokens, reason in found] == [(1, "length")] * 2
    assert session.calls == [1]  # nothing is computed that nobody asked for


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_token_cannot_be_asked_for(count: int) -> None:
    with pytest.raises(RequestError, match=f"max_new_tokens is {count}"):
        Request(prompt=(1,), max_new_tokens=count)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        Request(prompt=())


@pytest.mark.parametrize("rows", [1, 3])
def test_as_many_requests_as_rows_are_needed(rows: int) -> None:
    with pytest.raises(RequestError, match=f"{rows} requests.* 2 rows"):
        run(fake(2, 9), [Request(prompt=(1,))] * rows)


def test_a_token_that_the_model_does_not_know_is_refused(opened: SessionOf) -> None:
    with pytest.raises(RequestError, match="512"):
        run(opened("tiny", 1, 40), [Request(prompt=(1, 512))])


def test_a_stop_token_as_the_first_ends_an_empty_answer() -> None:
    (first,) = expected(Request(prompt=(5,), max_new_tokens=1), 9)[0]
    requests = [Request(prompt=(5,), stop=frozenset({first})), Request(prompt=(6,))]
    found = run(fake(2, 9), requests)
    assert found[0] == ([], "stop")
    assert found[1] == expected(requests[1], 9)


# Values that are no numbers.


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_stop_with_row_and_step(value: float) -> None:
    session = fake(2, 12, logits_of=broken_after(5, begins=2, value=value))
    requests = [Request(prompt=(1,), max_new_tokens=7), Request(prompt=(2, 3, 4))]
    steps = decode(session, requests)
    good = [next(steps) for _ in range(4)]
    assert [step.row for step in good] == [0, 1, 0, 1]
    with pytest.raises(NumericsError, match="row 1, step 2"):
        list(steps)


def test_the_row_is_named_as_the_caller_counts_even_if_others_have_finished() -> None:
    session = fake(2, 12, logits_of=broken_after(5, begins=2))
    requests = [Request(prompt=(1,), max_new_tokens=1), Request(prompt=(2, 3, 4))]
    with pytest.raises(NumericsError, match="row 1, step 2"):
        list(decode(session, requests))


def test_a_finished_row_without_numbers_does_not_disturb_the_others() -> None:
    session = fake(2, 12, logits_of=broken_after(4, begins=1))
    requests = [Request(prompt=(1, 3, 5), max_new_tokens=1), Request(prompt=(2, 3, 4))]
    assert run(session, requests) == [expected(request, 12) for request in requests]


def test_forced_logits_that_are_no_numbers_stop_with_their_position() -> None:
    session = fake(2, 12, logits_of=broken_after(5, begins=2))
    tokens = np.array([[1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]])
    for steps in (0, 1, 6):
        with pytest.raises(NumericsError, match="row 1 at position 4"):
            list(teacher_forced(session, tokens, decode_steps=steps, chunk=3))


# Teacher-forced logits.


@pytest.mark.parametrize("steps", [0, 1, 8, None])
def test_forced_logits_are_those_of_the_original(
    golden: Golden, opened: SessionOf, steps: int | None
) -> None:
    arrays = golden.arrays
    tokens = np.concatenate([arrays["tokens"], arrays["f32/decode_tokens"]], axis=1)
    tokens = tokens.astype(np.int64)
    wanted = np.concatenate([arrays["f32/prefill_logits"], arrays["f32/decode_logits"]], axis=1)
    session = opened(golden.name, 2, tokens.shape[1])
    count = tokens.shape[1] if steps is None else steps
    parts = list(teacher_forced(session, tokens, decode_steps=count, chunk=9))
    assert [part.shape[1] for part in parts[len(parts) - count :]] == [1] * count
    assert np.abs(np.concatenate(parts, axis=1) - wanted).max() < TOLERANCE


@settings(deadline=None)
@given(length=st.integers(1, 9), steps=st.integers(0, 9), chunk=st.integers(1, 10), data=st.data())
def test_every_position_is_computed_once_in_order(
    length: int, steps: int, chunk: int, data: st.DataObject
) -> None:
    token = st.integers(0, SMALL.vocab_size - 1)
    rows = data.draw(
        st.lists(st.lists(token, min_size=length, max_size=length), min_size=2, max_size=2)
    )
    session = fake(2, length)
    if steps > length:
        with pytest.raises(RequestError, match=f"{steps} tokens.*{length}"):
            list(teacher_forced(session, np.array(rows), decode_steps=steps, chunk=chunk))
        return
    parts = list(teacher_forced(session, np.array(rows), decode_steps=steps, chunk=chunk))
    wanted = [
        [logits_after(row[: n + 1], SMALL.vocab_size) for n in range(length)] for row in rows
    ]
    assert (np.concatenate(parts, axis=1) == np.array(wanted)).all()
    assert sum(session.calls) == length
    assert session.calls[len(session.calls) - steps :] == [1] * steps


# From file to file.


def saved(folder: Path, tokens: Any) -> Path:
    path = folder / "tokens.npy"
    np.save(path, tokens)
    return path


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("steps", [0, 4])
def test_logits_go_from_file_to_file(
    bundle_of: BundleOf, tmp_path: Path, dtype: Any, steps: int
) -> None:
    golden = load_golden("tiny")
    tokens = saved(tmp_path, golden.arrays["tokens"].astype(dtype))
    out = tmp_path / "logits.npz"
    shape = write_logits(bundle_of("tiny").folder, tokens, out, decode_steps=steps)
    assert shape == (2, 24, 512)
    with np.load(out) as file:
        assert list(file) == ["logits"]
        logits = file["logits"]
    assert (logits.shape, logits.dtype) == (shape, np.float32)
    assert np.abs(logits - golden.arrays["f32/prefill_logits"]).max() < TOLERANCE


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        pytest.param(np.ones((2, 3)), "float64", id="floats"),
        pytest.param(np.ones((2, 3), bool), "bool", id="bools"),
        pytest.param(np.ones(3, int), r"\[3\]", id="one axis"),
        pytest.param(np.ones((1, 2, 3), int), r"\[1, 2, 3\]", id="three axes"),
        pytest.param(np.ones((0, 3), int), r"no tokens.*\[0, 3\]", id="no rows"),
        pytest.param(np.ones((2, 0), int), r"no tokens.*\[2, 0\]", id="no positions"),
        pytest.param(np.full((2, 3), 512), "512.*0 to 511", id="beyond the vocabulary"),
        pytest.param(np.full((2, 3), -1), "-1.*0 to 511", id="negative"),
        pytest.param(np.full((2, 3), 2**64 - 1, np.uint64), "0 to 511", id="beyond int64"),
        pytest.param(np.ones((1, 65), int), "65 tokens.* 64", id="too long"),
        pytest.param(np.array([[{}, {}]], object), r"tokens\.npy", id="pickled objects"),
    ],
)
def test_token_files_that_do_not_suit_are_refused(
    bundle_of: BundleOf, tmp_path: Path, tokens: Any, message: str
) -> None:
    path = saved(tmp_path, tokens)
    with pytest.raises(RequestError, match=message):
        write_logits(bundle_of("tiny").folder, path, tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def archive(path: Path, tokens: NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.savez(file, tokens=tokens)


def cut_archive(path: Path, tokens: NDArray[Any]) -> None:
    archive(path, tokens)
    path.write_bytes(path.read_bytes()[:-30])


DAMAGES: dict[str, Callable[[Path, NDArray[Any]], Any]] = {
    "missing": lambda path, tokens: path.unlink(),
    "empty": lambda path, tokens: path.write_bytes(b""),
    "text": lambda path, tokens: path.write_text("1 2 3"),
    "cut": lambda path, tokens: path.write_bytes(path.read_bytes()[:-1]),
    "cut header": lambda path, tokens: path.write_bytes(path.read_bytes()[:40]),
    "archive": archive,
    "4 GB of header": lambda path, tokens: path.write_bytes(
        path.read_bytes().replace(b"NUMPY\x01\x00", b"NUMPY\x02\x00")
    ),
    "cut archive": cut_archive,
    "huge": lambda path, tokens: path.write_bytes(
        path.read_bytes().replace(b"(2, 24), }" + b" " * 20, b"(99999999999, 999999999), }   ")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_token_files_that_cannot_be_read_are_refused_by_name(
    bundle_of: BundleOf, tmp_path: Path, damage: Callable[[Path, NDArray[Any]], Any]
) -> None:
    tokens = load_golden("tiny").arrays["tokens"]
    path = saved(tmp_path, tokens)
    whole = path.read_bytes()
    damage(path, tokens)
    assert not path.exists() or path.read_bytes() != whole
    with pytest.raises(RequestError, match=r"tokens\.npy"):
        write_logits(bundle_of("tiny").folder, path, tmp_path / "out.npz")


def test_more_single_steps_than_tokens_are_refused(bundle_of: BundleOf, tmp_path: Path) -> None:
    path = saved(tmp_path, np.ones((1, 3), int))
    for steps in (4, -1):
        with pytest.raises(RequestError, match=f"{steps} tokens"):
            write_logits(bundle_of("tiny").folder, path, tmp_path / "out.npz", decode_steps=steps)
