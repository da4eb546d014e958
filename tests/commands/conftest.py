"""What the tests of commands share: running one, and things to run it on."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.cli import main
from export_grok.config import GrokConfig
from export_grok.export.demo import DEMO_MODEL
from tests.bundles import BundleOf, bundle_of, checkpoint_copy, traced_once
from tests.runtime.fake_session import FakeSession, LogitsOf

__all__ = ["bundle_of", "traced_once"]


DEMO = GrokConfig.from_file(DEMO_MODEL / "config.json")
FILES = 2 + 12 * DEMO.num_layers


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
Refused = Callable[..., str]
Answers = Callable[[LogitsOf], None]
Fails = Callable[[Callable[[Sequence[int]], bool]], None]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Return what runs a command in this process."""

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        on_interrupt = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        signal.signal(signal.SIGINT, on_interrupt)  # a command that was interrupted ends deaf
        out, err = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, out, err)

    return run


@pytest.fixture
def refused(run: Run) -> Refused:
    """Return what runs a command that must fail in one message, and returns the message."""

    def refused(*arguments: object, code: int = 2) -> str:
        outcome = run(*arguments)
        assert outcome.code == code, outcome
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        usage, _, text = outcome.err.rpartition("Error: ")
        assert "Error: " not in usage
        assert usage == "" or (usage.startswith("Usage: ") and usage.count("Usage: ") == 1)
        return text.rstrip("\n")

    return refused


@pytest.fixture
def done(run: Run) -> Run:
    """Return what runs a command that must succeed."""

    def done(*arguments: object) -> Outcome:
        outcome = run(*arguments)
        assert outcome.code == 0, outcome
        return outcome

    return done


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return a checkpoint of 2 layers that may be damaged."""
    return checkpoint_copy("tiny", tmp_path / "tiny")


@pytest.fixture
def demo(bundle_of: BundleOf) -> Path:
    """Return the demo's bundle; it is shared."""
    return bundle_of("demo").folder


@pytest.fixture
def checkpoint(bundle_of: BundleOf) -> Path:
    """Return the demo's checkpoint; it is shared."""
    return bundle_of("demo").weights_root


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Return where nothing may be left."""
    out = tmp_path / "new" / "out"
    out.parent.mkdir()
    yield out
    assert list(out.parent.iterdir()) == []


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Return a file with two rows of five tokens."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(10).reshape(2, 5) + 4)
    return path


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return what has models answer by made-up logits."""

    def answers(logits_of: LogitsOf) -> None:
        @contextmanager
        def open_fake(bundle: Bundle, *, batch: int, max_length: int, **_: Any) -> Iterator[Any]:
            sizes = {"batch": batch, "max_length": max_length}
            yield FakeSession(bundle.config, **sizes, logits_of=logits_of)

        monkeypatch.setattr("export_grok.runtime.model.open_session", open_fake)

    return answers


@pytest.fixture
def fails(answers: Answers) -> Fails:
    """Return what has answers fail by the tokens so far; else they count through the ids."""

    def fails(when: Callable[[Sequence[int]], bool]) -> None:
        def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
            logits = np.zeros(vocabulary, np.float32)
            logits[5 + len(tokens)] = np.nan if when(tokens) else 1
            return logits

        answers(logits_of)

    return fails
