"""What the tests of polygraphy's side share: its command in this process, and bundles."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER
from polygraphy.tools import main

from export_grok.artifacts import Bundle
from export_grok.config import EngineOptions
from export_grok.engines.pipeline import engine_from_source
from tests.bundles import bundle_of
from tests.conftest import DATA

__all__ = ["bundle_of"]


@dataclass(frozen=True)
class Outcome:
    """What polygraphy's command left behind."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """What it said, without its own time and indent."""
        return [line.removeprefix("[I]").strip() for line in self.text.splitlines()]


def polygraphy(*arguments: str) -> int:
    """Run polygraphy's command in this process and return its exit code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SelectableGroups", DeprecationWarning)  # it finds us so
        code: int = main(list(arguments))
    return code


Run = Callable[..., Outcome]
Refused = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs `polygraphy run` in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = polygraphy("run", *map(str, arguments))
        out, err = capsys.readouterr()
        return Outcome(code, out + err)

    return run


@pytest.fixture
def refused(run: Run) -> Refused:
    """Return what runs a command that must fail in one message, and returns the message."""

    def refused(*arguments: object) -> str:
        outcome = run(*arguments)
        assert outcome.code == 1
        assert "Traceback" not in outcome.text
        said = [part for part in f"\n{outcome.text}".split("\n[") if part.startswith("!]")]
        assert len(said) == 1
        return said[0].removeprefix("!]").strip()

    return refused


@pytest.fixture
def quiet() -> Iterator[None]:
    """Have polygraphy say nothing."""
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        yield


@pytest.fixture(scope="session")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return the engine of a fixture model for two ranks."""
    folder = tmp_path_factory.mktemp("ranks") / "bundle"
    options = EngineOptions(tensor_parallel=2)
    return engine_from_source(DATA / "tiny", folder, backend="ort", engine=options)


def passes(runs: Any, compare: Any) -> bool:
    """Return whether all runs agree."""
    return bool(Comparator.compare_accuracy(runs, compare_func=compare))


def graphs_of(bundle: Bundle) -> list[Path]:
    """Return the graphs of a bundle that run, as they are exported."""
    layers = sorted(bundle.folder.glob("layer_??.onnx"))
    return [bundle.folder / f"{kind}.onnx" for kind in ("embedding", "head", "head_all")] + layers
