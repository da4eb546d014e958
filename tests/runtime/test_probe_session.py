"""A session of single graphs says what the whole model says, and lets its graphs go."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.config import Dtype, GrokConfig
from export_grok.engines.probe import GraphName, Run
from export_grok.errors import RequestError
from export_grok.runtime.probe_session import ProbeSession, open_probe_session
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.torch_session import TorchSession
from export_grok.runtime.verify.steps import steps_of
from tests.conftest import FIXTURES, load_golden
from tests.runtime.verify.bundles import bundle_with

SLOTS = 24


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return {name: bundle_with(name, folder / name) for name in FIXTURES}


@contextmanager
def session_of(bundle: Bundle, batch: int = 2, dtype: Dtype = "float32") -> Iterator[ProbeSession]:
    probe = TorchProbe.of_bundle(bundle, dtype)
    with open_probe_session(probe, batch=batch, max_length=SLOTS) as session:
        yield session


@pytest.mark.parametrize("name", FIXTURES)
def test_it_says_what_the_whole_model_says_to_rows_of_any_length(
    name: str, bundles: dict[str, Bundle]
) -> None:
    config = bundles[name].config
    random = np.random.default_rng(0)
    rows = [random.integers(0, config.vocab_size, length).tolist() for length in (17, 9, 5)]
    model = TorchSession(bundles[name], batch=3, max_length=SLOTS)
    with session_of(bundles[name], batch=3) as session:
        for step in steps_of(rows, decode=3, chunk=7, max_length=SLOTS):
            wanted = model.forward_all(step.tokens, step.start)[step.counts]
            found = session.forward_all(step.tokens, step.start)[step.counts]
            scale = np.sqrt(np.square(wanted).mean())
            assert np.abs(found - wanted).max() < 1e-6 * scale
            # The same tokens once more into the same slots: for one token of each row.
            last = session.forward(step.tokens, step.start, step.last)
            right = model.forward(step.tokens, step.start, step.last)
            assert last is not None
            assert right is not None
            ends = step.length > 0
            # Fewer tokens are multiplied by the head's matrix in another order.
            assert np.abs(last[ends] - right[ends]).max() < 1e-5 * scale


def test_without_last_tokens_are_written_and_nothing_is_said(bundles: dict[str, Bundle]) -> None:
    tokens = np.arange(12).reshape(2, 6)
    start, later = np.zeros(2, np.int64), np.full(2, 3)
    with session_of(bundles["tiny"]) as session:
        whole = session.forward_all(tokens, start)
    with session_of(bundles["tiny"]) as session:
        assert session.forward(tokens[:, :3], start, None) is None
        assert session.forward_all(tokens[:, 3:], later) == pytest.approx(whole[:, 3:], abs=1e-4)


def test_two_sessions_of_one_probe_share_no_cache(bundles: dict[str, Bundle]) -> None:
    probe = TorchProbe.of_bundle(bundles["tiny"])
    tokens, start = np.arange(8).reshape(2, 4), np.zeros(2, np.int64)
    one_more, end = np.full((2, 1), 9), np.full(2, 4)
    with (
        open_probe_session(probe, batch=2, max_length=SLOTS) as first,
        open_probe_session(probe, batch=2, max_length=SLOTS) as second,
    ):
        first.forward(tokens, start, None)
        wanted = first.forward_all(one_more, end)
        first.forward(tokens, start, None)
        second.forward(tokens + 100, start, None)
        assert np.array_equal(first.forward_all(one_more, end), wanted)
        assert not np.allclose(second.forward_all(one_more, end), wanted)


def test_a_bfloat16_model_speaks_float32(bundles: dict[str, Bundle]) -> None:
    tokens, start = np.arange(8).reshape(2, 4), np.zeros(2, np.int64)
    with session_of(bundles["tiny"], dtype="bfloat16") as session:
        said = session.forward_all(tokens, start)
    wanted = TorchSession(bundles["tiny"], batch=2, max_length=SLOTS, dtype="bfloat16")
    assert said.dtype == np.float32
    assert np.array_equal(said, wanted.forward_all(tokens, start))


# ---- graphs


class Counted:
    """A probe of nothing that tells which graphs are loaded."""

    name = "nothing"
    dtype: Dtype = "float32"

    def __init__(self, config: GrokConfig) -> None:
        self.config = config
        self.loaded: list[str] = []
        self.ran: list[str] = []

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        def run(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            self.ran.append(str(name))
            return {
                "h": np.zeros(1),
                "h_out": np.zeros(1),
                "k_out": np.zeros(1),
                "v_out": np.zeros(1),
                "logits": np.zeros(1),
            }

        self.loaded.append(str(name))
        try:
            yield run
        finally:
            self.loaded.remove(str(name))


def test_each_graph_is_loaded_once_run_in_order_and_let_go() -> None:
    probe = Counted(load_golden("tiny8").config)
    layers = ["layer 0", "layer 1", "layer 2"]
    tokens, start = np.zeros((1, 2), np.int64), np.zeros(1, np.int64)
    with open_probe_session(probe, batch=1, max_length=4) as session:
        assert sorted(probe.loaded) == sorted(["embedding", *layers, "head", "head_all"])
        session.forward(tokens, start, None)
        assert probe.ran == ["embedding", *layers]
        session.forward(tokens, start, np.ones(1, np.int64))
        assert probe.ran[4:] == ["embedding", *layers, "head"]
        session.forward_all(tokens, start)
        assert probe.ran[9:] == ["embedding", *layers, "head_all"]
    assert probe.loaded == []


def test_a_graph_that_does_not_load_leaves_none_behind() -> None:
    class Broken(Counted):
        @contextmanager
        def graph(self, name: GraphName) -> Iterator[Run]:
            if name.layer == 1:
                raise RequestError("it does not load")
            with super().graph(name) as run:
                yield run

    probe = Broken(load_golden("tiny8").config)
    with (
        pytest.raises(RequestError, match="does not load"),
        open_probe_session(probe, batch=1, max_length=4),
    ):
        pass
    assert probe.loaded == []


# ---- refused


@pytest.mark.parametrize(
    ("tokens", "start", "last", "told"),
    [
        (np.zeros((3, 2), int), [0, 0], [0, 0], r"tokens have shape \(3, 2\)"),
        (np.zeros((2, 2), int), [0], [0, 0], r"start is \[0\]"),
        (np.zeros((2, 2), int), [0, SLOTS - 1], [0, 0], f"{SLOTS + 1} tokens do not fit"),
        (np.full((2, 2), 512), [0, 0], [0, 0], "512"),
        (np.zeros((2, 2), int), [0, 0], [0, 2], r"last is \[0, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tokens: NDArray[np.int64],
    start: list[int],
    last: list[int],
    told: str,
    bundles: dict[str, Bundle],
) -> None:
    first, begin = np.arange(8).reshape(2, 4), np.zeros(2, np.int64)
    one_more, end = np.full((2, 1), 9), np.full(2, 4)
    with session_of(bundles["tiny"]) as session:
        session.forward(first, begin, None)
        wanted = session.forward_all(one_more, end)
        with pytest.raises(RequestError, match=told):
            session.forward(tokens, np.array(start), np.array(last))
        assert np.array_equal(session.forward_all(one_more, end), wanted)
