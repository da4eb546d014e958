"""A soak finds nothing, and what it looks for it finds: planted mistakes.

`python -m scripts.soak` goes on where the first of these tests ends.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.runtime import GenerationParams, Piece, Result
from export_grok.runtime.batching.rows import Rows
from export_grok.runtime.observer import Load, Usage
from export_grok.runtime.sampling.draw import sample
from export_grok.runtime.text.tokenizer import tokenizer_of
from export_grok.runtime.work import Work
from scripts.soak import main
from scripts.soaking import cases, clients, run
from scripts.soaking.cases import Turn
from scripts.soaking.compare import Answers, Parted, was_open
from scripts.soaking.ledger import Ledger
from scripts.soaking.memory import Memory
from scripts.soaking.run import Options, soaked
from tests.bundles import BundleOf
from tests.bundles import bundle_of as bundle_of
from tests.runtime.fake_session import FakeSession

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="needs a system that tells of memory"
)

USAGE = Usage(
    prompt_tokens=2,
    cached_tokens=0,
    new_tokens=2,
    waited_seconds=0,
    first_token_seconds=0,
    decode_seconds=0,
)
LOAD = Load(batch=2, running=2, waiting=0, cache_tokens=9, kept_tokens=0, capacity=20)
SHORT = Options(minutes=0.02, clients=6, batch=3, pool=8, max_waiting=2, seed=1)


@pytest.fixture
def demo(bundle_of: BundleOf) -> Bundle:
    return bundle_of("demo")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for minutes for what does not come."""
    for module in (cases, clients, run):
        monkeypatch.setattr(module, "PATIENCE", 1.0)


def test_a_short_soak_finds_nothing(demo: Bundle, tmp_path: Path) -> None:
    words = [demo.folder, "--minutes", 0.03, "--clients", 6, "--batch", 3, "--pool", 12]
    words += ["--max-waiting", 2, "--json", tmp_path / "told.json"]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert "0 faults" in done.output
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["faults"] == []
    assert told["answers"]["equal"] > 0
    ends = [count for name, count in told["events"].items() if name.startswith("ended")]
    assert sum(ends) == told["events"]["submitted"] > 10


# Planted mistakes.


def longer_than_it_is(self: Rows, prompt: NDArray[np.int64]) -> NDArray[np.int64]:
    found = COMMON(self, prompt)
    longer: NDArray[np.int64] = np.minimum(found + 1, np.minimum(self._length, len(prompt)))
    return longer


COMMON = Rows._common


def test_a_token_too_many_taken_from_another_prompt_is_found(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "_common", longer_than_it_is)
    soak = soaked(demo.folder, dataclasses.replace(SHORT, minutes=0.03))
    assert any("not what comes alone" in fault for fault in soak.faults)
    assert soak.answers["parted"] > 0


def test_a_row_that_is_never_free_again_is_found(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, kept = Rows.let_go, [True]

    def but_once(self: Rows, row: int, *, keep: bool = True) -> None:
        if not kept or row != 1:
            let_go(self, row, keep=keep)
        else:
            kept.clear()

    monkeypatch.setattr(Rows, "let_go", but_once)
    soak = soaked(demo.folder, SHORT)
    assert any("nobody asks, and the load is" in fault for fault in soak.faults)


@pytest.mark.usefixtures("impatient")
def test_an_end_that_nobody_is_told_is_found(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Work.publish

    def but_some(self: Work) -> None:
        number = int(self.handle.id)
        if not self.ended or number < 20 or number % 3:
            publish(self)

    monkeypatch.setattr(Work, "publish", but_some)
    told = " ".join(soaked(demo.folder, SHORT).faults)
    assert "has not ended after" in told or "still waits" in told


def planted(*events: Callable[[Ledger], None]) -> str:
    ledger = Ledger()
    for event in events:
        event(ledger)
    return "; ".join([*ledger.faults, *(f"{name} is open" for name in ledger.open)])


def begins(ledger: Ledger) -> None:
    ledger.submitted("7", prompt_tokens=2)


def speaks(ledger: Ledger) -> None:
    ledger.token("7", seconds=0, first=True)


def ends(ledger: Ledger) -> None:
    ledger.finished("7", reason="length", usage=USAGE, error=None)


def test_the_ledger_finds_what_does_not_add_up() -> None:
    assert planted(begins, speaks, speaks, ends) == ""
    assert planted(begins, speaks, speaks) == "7 is open"
    assert "ended (length) without being under way" in planted(begins, speaks, speaks, ends, ends)
    assert "submitted twice" in planted(begins, begins, speaks, speaks, ends)
    assert "given 1 tokens, its usage says 2" in planted(begins, speaks, ends)
    broken = ValueError("bits")
    assert "ValueError" in planted(
        begins,
        speaks,
        speaks,
        lambda ledger: ledger.finished("7", reason="error", usage=USAGE, error=broken),
    )
    full = dataclasses.replace(LOAD, cache_tokens=21)
    assert planted(lambda ledger: ledger.changed(LOAD)) == ""
    assert "more than there is" in planted(lambda ledger: ledger.changed(full))


def result_of(demo: Bundle, **changed: Any) -> Result:
    tokens = changed.get("tokens", (300, 301))
    tokenizer = tokenizer_of(demo)
    whole, prompt = tokenizer.decode([9, 10, *tokens]), tokenizer.decode([9, 10])
    fields: dict[str, Any] = {
        "id": "7",
        "prompt_tokens": (9, 10),
        "text": whole.removeprefix(prompt),
        "tokens": tokens,
        "logprobs": None,
        "finish_reason": "length",
        "usage": dataclasses.replace(USAGE, new_tokens=len(tokens)),
        "shown_tokens": 0,
        "shown_rest": "",
    }
    return Result(**fields | changed)


def compared(demo: Bundle, result: Result, pieces: list[Piece] | None = None) -> Answers:
    answers = Answers(tokenizer_of(demo), demo.config.eos_token)
    turn = Turn(prompt=[9, 10], params=GenerationParams(), alone=result_of(demo))
    assert answers.take(turn, result, pieces) == (not answers.faults and not answers.parted)
    return answers


def test_answers_that_are_those_alone_or_begin_them_are_no_faults(demo: Bundle) -> None:
    assert compared(demo, result_of(demo)).counts == {"equal": 1}
    begun = result_of(demo, tokens=(300,), finish_reason="cancelled")
    assert compared(demo, begun).counts == {"cancelled, its beginning": 1}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"prompt_tokens": (9, 11)}, "another prompt"),
        ({"text": "other"}, "is not that of the tokens"),
        ({"finish_reason": "stop"}, "end by stop"),
        ({"usage": USAGE.__class__(**vars(USAGE) | {"new_tokens": 3})}, "is not of 2 tokens"),
        ({"usage": USAGE.__class__(**vars(USAGE) | {"cached_tokens": 2})}, "is not of 2 tokens"),
    ],
)
def test_answers_that_contradict_themselves_are_faults(
    demo: Bundle, changed: dict[str, Any], told: str
) -> None:
    (fault, *_) = compared(demo, result_of(demo, **changed)).faults
    assert told in fault


def test_pieces_that_are_not_the_answer_are_faults(demo: Bundle) -> None:
    result = result_of(demo)
    first = Piece(text=result.text, token=300)
    last = Piece(text="", token=301, finish_reason="length")
    assert compared(demo, result, [first, last]).faults == []
    for pieces, told in (
        ([first], "ended by"),
        ([last], "do not make the text"),
        ([first, last, last], "not of the tokens"),
        ([first, dataclasses.replace(last, finish_reason="stop")], "ended by"),
    ):
        assert any(told in fault for fault in compared(demo, result, pieces).faults), told


@pytest.mark.parametrize(
    ("tokens", "reason", "token"),
    [
        ((300, 302), "length", 302),
        ((300,), "stop", 2),
        ((300, 301, 302), "length", 302),
        ((301,), "cancelled", 301),
    ],
)
def test_an_answer_that_leaves_the_one_alone_is_kept_to_be_settled(
    demo: Bundle, tokens: tuple[int, ...], reason: str, token: int
) -> None:
    answers = compared(demo, result_of(demo, tokens=tokens, finish_reason=reason))
    assert [parted.token for parted in answers.parted] == [token]
    assert answers.faults == []


def test_a_choice_is_open_only_to_what_rounding_does(demo: Bundle) -> None:
    def near(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        logits = np.zeros(vocabulary, np.float32)
        logits[[4, 5, 6]] = 2.0, 2.0 - 1e-6, 1.99
        return logits

    session = FakeSession(demo.config, batch=1, max_length=20, logits_of=near)

    def is_open(token: int, **params: Any) -> bool:
        return was_open(Parted((1, 2, 3), 1, token, GenerationParams(**params)), session)

    assert [token for token in range(10) if is_open(token)] == [4, 5]
    warm = GenerationParams(temperature=1.0, seed=1)
    (drawn,) = sample(near((), demo.config.vocab_size)[None], [warm], [1]).tolist()
    assert is_open(drawn, temperature=1.0, seed=1)
    assert not is_open(drawn - 2, temperature=1.0, seed=1)
    assert not is_open(drawn + 2, temperature=1.0, seed=1)


def test_growth_is_told_from_the_last_two_thirds() -> None:
    seconds = [float(second) for second in range(30)]
    flat = Memory(1.0, seconds, [100 * min(n, 9) for n in range(30)])
    assert abs(flat.growth) < 100
    grows = Memory(1.0, seconds, [50 * n for n in range(30)])
    assert grows.growth == pytest.approx(3000)
    assert Memory(1.0).growth == 0
