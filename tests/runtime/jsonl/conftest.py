"""What the tests of files of requests share."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from export_grok.artifacts import Bundle
from export_grok.runtime.model_to_load import ModelToLoad
from tests.bundles import BundleOf, bundle_of
from tests.runtime.fake_session import FakeSession, LogitsOf, logits_after

__all__ = ["bundle_of"]

Write = Callable[[Sequence[Mapping[str, Any]]], Path]


@pytest.fixture
def demo(bundle_of: BundleOf) -> Bundle:
    """Return the demo's bundle; it is shared."""
    return bundle_of("demo")


@pytest.fixture
def model(demo: Bundle) -> ModelToLoad:
    """Return the demo before it is loaded, with 64 tokens of cache."""
    return ModelToLoad.of(demo.folder, max_length=64)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return what writes a file of requests."""

    def write(requests: Sequence[Mapping[str, Any]]) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(request) + "\n" for request in requests))
        return path

    return write


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FakeSession]]:
    """Return what has models run on made-up sessions; it returns the list of those opened."""

    def made_up(
        logits_of: LogitsOf = logits_after, kind: type[FakeSession] = FakeSession
    ) -> list[FakeSession]:
        opened: list[FakeSession] = []

        @contextmanager
        def open_fake(
            bundle: Bundle, *, batch: int, max_length: int, **_: Any
        ) -> Iterator[FakeSession]:
            opened.append(
                kind(bundle.config, batch=batch, max_length=max_length, logits_of=logits_of)
            )
            yield opened[-1]

        monkeypatch.setattr("export_grok.runtime.model.open_session", open_fake)
        return opened

    return made_up
