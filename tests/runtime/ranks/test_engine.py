"""Ranks as processes, on the fixtures and the demo: the logits and the tokens of one process."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.config import EngineOptions
from export_grok.engines.backend import RowSession
from export_grok.engines.pipeline import engine_from_source
from export_grok.export import graph_folder
from export_grok.export.demo import write_demo_checkpoint
from export_grok.plugins.kernels import native_kernels
from export_grok.runtime import GenerationParams, load
from export_grok.runtime.decode import decode, teacher_forced
from export_grok.runtime.open import open_session
from export_grok.runtime.request import Request
from tests.bundles import BundleOf, bundle_of, traced
from tests.conftest import DATA, load_golden
from tests.engines.ort.logits import TOLERANCE

__all__ = ["bundle_of"]  # a fixture

RANKS = [
    ("tiny", 2),
    ("tiny8", 2),
    ("tiny8", 4),
    ("tiny8", 8),
    ("deep13", 2),
    ("deep13", 4),
    ("deep13", 8),
    ("demo", 2),
]
# Between numbers of ranks, of the largest logit: sums of other lengths. Built-in kernels leave out
# a part of the largest activation of a group, and groups are others.
SAME = {"native": 1e-5, "builtin": 1e-4}
STEPS = 32

RankedOf = Callable[[str, int], Bundle]


@pytest.fixture(scope="module")
def ranked_of(tmp_path_factory: pytest.TempPathFactory) -> RankedOf:
    """Return the way to the bundle of a model for so many ranks."""

    @functools.cache
    def bundle(name: str, ranks: int) -> Bundle:
        folder = tmp_path_factory.mktemp(f"{name}_{ranks}")
        source = DATA / name
        if name == "demo":
            source = folder / "checkpoint"
            write_demo_checkpoint(source)
        options = EngineOptions(tensor_parallel=ranks, allow_functions=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph_folder, "template_from_config", traced)
            patch.setattr("export_grok.export.trace.template_from_config", traced)
            return engine_from_source(source, folder / "bundle", backend="ort", engine=options)

    return bundle


def prompts(name: str) -> list[tuple[int, ...]]:
    """Return three prompts of different lengths."""
    if name == "demo":
        random = np.random.default_rng(3)
        rows: NDArray[np.int64] = random.integers(3, 1000, (2, 12))
    else:
        rows = load_golden(name).arrays["tokens"].astype(np.int64)
    whole = [tuple(row.tolist()) for row in rows]
    return [whole[0], whole[1][:5], whole[0][:1]]


def answers(session: RowSession, name: str, steps: int) -> list[list[int]]:
    """Return what greedy decoding says to all prompts in one batch."""
    requests = [Request(prompt=prompt, max_new_tokens=steps) for prompt in prompts(name)]
    found: list[list[int]] = [[] for _ in requests]
    for step in decode(session, requests):
        if step.token is not None:
            found[step.row].append(step.token)
    return found


@pytest.mark.parametrize(("name", "ranks"), RANKS)
def test_ranks_are_one_process_in_logits_and_in_greedy_tokens(
    name: str, ranks: int, ranked_of: RankedOf, bundle_of: BundleOf, started: list[int]
) -> None:
    alone, together = bundle_of(name), ranked_of(name, ranks)
    longest = max(map(len, prompts(name)))
    steps = min(STEPS, alone.config.sequence_len - longest)
    tokens = np.array([prompts(name)[0]] * 3)
    logits, said = [], []
    for bundle in (alone, together):
        with open_session(bundle, batch=3, max_length=longest + steps) as session:
            parts = [*teacher_forced(session, tokens, decode_steps=3, chunk=5)]
            logits.append(np.concatenate(parts, axis=1))
            said.append(answers(session, name, steps))
    assert len(started) == ranks
    same = SAME["native" if native_kernels().library else "builtin"]
    assert np.abs(logits[0] - logits[1]).max() <= same * max(1.0, np.abs(logits[0]).max())
    assert said[0] == said[1]
    assert all(len(row) == steps for row in said[0])


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("tiny8", 8), ("deep13", 4)])
def test_ranks_give_the_logits_of_the_original(
    name: str, ranks: int, ranked_of: RankedOf, started: list[int]
) -> None:
    golden = load_golden(name)
    tokens = golden.arrays["tokens"].astype(np.int64)
    bundle = ranked_of(name, ranks)
    with open_session(bundle, batch=len(tokens), max_length=tokens.shape[1]) as session:
        found = np.concatenate([*teacher_forced(session, tokens, chunk=7)], axis=1)
    assert np.abs(found - golden.arrays["f32/prefill_logits"]).max() <= TOLERANCE


def test_the_same_bundle_gives_the_same_bits_each_time(
    ranked_of: RankedOf, started: list[int]
) -> None:
    bundle = ranked_of("tiny8", 4)
    tokens = np.array([prompts("tiny8")[0]])
    runs = []
    for _ in range(2):
        with open_session(bundle, batch=1, max_length=tokens.shape[1]) as session:
            runs.append(np.concatenate([*teacher_forced(session, tokens)], axis=1))
    assert runs[0].tobytes() == runs[1].tobytes()


def test_a_model_of_ranks_answers_many_and_leaves_none_behind(
    ranked_of: RankedOf, bundle_of: BundleOf, started: list[int]
) -> None:
    alone, together = bundle_of("demo"), ranked_of("demo", 2)
    params = GenerationParams(max_new_tokens=12, ignore_eos=True)
    beginning = "In the beginning God created the heaven and the earth, and the sea,"
    texts = [beginning, f"{beginning} and", "The king", f"{beginning} and all"]
    with load(alone.folder, batch=2) as model:
        wanted = [model.generate(text, params)[0].tokens for text in texts]
    with load(together.folder, batch=2) as model:
        handles = [model.submit(text, params) for text in texts]
        cancelled = model.submit("The words", params)
        cancelled.cancel()
        assert [handle.result().tokens for handle in handles] == wanted
        assert cancelled.result().finish_reason == "cancelled"
        talk = model.conversation()
        talk.say("The lamp", params).result()
        assert talk.say(" and", params).result().usage.cached_tokens > 0
    assert len(started) == 2
    assert not any(Path(f"/proc/{process}").exists() for process in started)
