"""Inputs that are made are ones a graph can meet, and given ones are held to that."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from polygraphy.exception import PolygraphyException

from export_grok.artifacts import Bundle
from export_grok.config import GrokConfig
from export_grok.engines.probe import GraphName
from export_grok.export.contract import ports
from export_grok.export.demo import DEMO_MODEL
from export_grok.runtime.verify.poly.data import GivenInputs, GraphInputs
from export_grok.runtime.verify.poly.demo_data import Reading
from tests.bundles import BundleOf
from tests.conftest import FIXTURES, load_golden
from tests.runtime.verify.poly.conftest import graphs_of

pytestmark = pytest.mark.usefixtures("quiet")

DEMO = GrokConfig.from_file(DEMO_MODEL / "config.json")
READING = Reading(batch=3, longest=24, slots=29)
HEAD = GraphName(kind="head")


def kurtosis(array: NDArray[np.float32]) -> float:
    """Return the fourth moment in squares of the second: 3 of normal numbers."""
    square = np.square(array.astype(np.float64))
    return float(np.square(square).mean() / square.mean() ** 2)


def counted(hidden: tuple[NDArray[np.float32], ...]) -> NDArray[np.float32]:
    """Return the residual stream of all tokens that count, [tokens, M], but of the faint step."""
    steps = READING.steps(DEMO.vocab_size)
    assert steps[-1].gain < 1
    kept = [h[step.counts] for h, step in zip(hidden, steps, strict=True)]
    return np.concatenate(kept[:-1])


@pytest.fixture(params=["demo", "tiny", "deep13"])
def bundle(request: pytest.FixtureRequest, bundle_of: BundleOf) -> Bundle:
    return bundle_of(request.param)


def test_inputs_are_those_of_the_contract(bundle: Bundle) -> None:
    for path in graphs_of(bundle):
        inputs = GraphInputs(path)
        assert len(inputs) == len(list(inputs)) == len(inputs.steps)
        rows = ports(inputs.file.graph.kind, bundle.config, "float32")
        wanted = {row.name: row for row in rows if row.direction == "in"}
        for feed in inputs:
            assert feed.keys() == wanted.keys()
            sizes: dict[str, int] = {}
            for name, array in feed.items():
                assert array.dtype == wanted[name].dtype
                for axis, length in zip(wanted[name].shape, array.shape, strict=True):
                    expected = axis if isinstance(axis, int) else sizes.setdefault(axis, length)
                    assert length == expected


def test_positions_lengths_and_caches_belong_together(bundle: Bundle) -> None:
    inputs = GraphInputs(bundle.folder / "layer_01.onnx")
    for step, feed in zip(inputs.steps, inputs, strict=True):
        slots = feed["k_cache"].shape[2]
        assert (feed["start"] == step.start).all()
        assert (step.start + step.tokens.shape[1] <= slots).all()
    starts = [tuple(step.start) for step in inputs.steps]
    assert any(len(set(start)) == len(start) for start in starts)  # all rows at other places
    for before, after in itertools.pairwise(range(len(inputs) - 1)):  # but for the faint step
        ends = inputs.steps[before].start + inputs.steps[before].length
        assert (inputs.steps[after].start == ends).all()
        for name in ("k_cache", "v_cache"):
            kept = np.arange(inputs[0][name].shape[2]) < inputs.steps[before].start[:, np.newaxis]
            same = inputs[before][name] == inputs[after][name]
            assert same.transpose(0, 2, 1, 3)[kept].all()
            behind = np.arange(inputs[0][name].shape[2]) >= ends[:, np.newaxis]
            assert same.transpose(0, 2, 1, 3)[behind].all()
            assert np.abs(inputs[after][name]).min() > 0  # no slot is empty


def test_inputs_are_the_same_in_every_run_unless_another_seed_is_given(bundle: Bundle) -> None:
    for path in graphs_of(bundle):
        first, again, other = (list(GraphInputs(path, seed=seed)) for seed in (0, 0, 1))
        for one, same in zip(first, again, strict=True):
            assert all((one[name] == same[name]).all() for name in one)
        differ = [
            (one[name] != new[name]).any()
            for one, new in zip(first, other, strict=True)
            for name in one
        ]
        assert any(differ)


def test_so_many_iterations_are_the_first_steps(bundle: Bundle) -> None:
    path = bundle.folder / "layer_00.onnx"
    whole = GraphInputs(path)
    first = GraphInputs(path, iterations=2)
    assert [step.name for step in first.steps] == [step.name for step in whole.steps[:2]]
    assert all((first[1][name] == whole[1][name]).all() for name in whole[1])


@given(vocab_size=st.integers(2, 200_000), seed=st.integers(0, 9))
def test_ids_are_of_the_vocabulary_its_first_and_last_among_them(
    vocab_size: int, seed: int
) -> None:
    steps = dataclasses.replace(READING, seed=seed).steps(vocab_size)
    ids = np.concatenate([step.tokens[step.counts] for step in steps])
    assert ids.min() == 0
    assert ids.max() == vocab_size - 1


@given(
    batch=st.integers(1, 3),
    slots=st.integers(1, 40),
    spare=st.integers(0, 5),
)
def test_rows_fit_whatever_the_slots(batch: int, slots: int, spare: int) -> None:
    reading = Reading(batch=batch, longest=max(1, slots - spare), slots=slots)
    for step in reading.steps(DEMO.vocab_size):
        assert len(step.tokens) == batch
        assert (step.start + step.tokens.shape[1] <= slots).all()


@pytest.mark.parametrize("layer", range(DEMO.num_layers))
def test_a_layer_of_the_demo_is_fed_what_it_computes(layer: int) -> None:
    """The residual stream of a token depends on those before it only, whatever comes with it."""
    graph = GraphName(kind="layer", layer=layer)
    given = READING.activations(DEMO, graph, "float32")
    whole = Reading(batch=1, longest=24, slots=40).activations(DEMO, graph, "float32")
    for step, ours, theirs in zip(
        READING.steps(DEMO.vocab_size), given.hidden, whole.hidden, strict=True
    ):
        count = int(step.length[0])
        np.testing.assert_allclose(ours[0, :count], theirs[0, :count], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(given.keys[0, :, :24], whole.keys[0, :, :24], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [192, 384, 1000, 6144])
def test_activations_of_any_width_are_as_large_and_as_heavy_tailed_as_the_demo_s(
    width: int,
) -> None:
    wide = GrokConfig.from_dict(DEMO.to_dict() | {"emb_size": width})
    for graph in (HEAD, GraphName(kind="layer", layer=1), GraphName(kind="layer", layer=2)):
        own = counted(READING.activations(DEMO, graph, "float32").hidden)
        spread = counted(READING.activations(wide, graph, "float32").hidden)
        assert kurtosis(own) > 4  # of normal numbers 3
        assert kurtosis(spread) == pytest.approx(kurtosis(own), rel=0.2)
        assert np.square(spread).mean() == pytest.approx(np.square(own).mean(), rel=0.2)
        size = np.sqrt(np.square(spread).mean(axis=0))
        assert size.max() > 3 * np.median(size)  # a few channels are large in every token


def test_repeated_channels_do_not_add_up() -> None:
    wide = GrokConfig.from_dict(DEMO.to_dict() | {"emb_size": 64 * DEMO.emb_size})
    hidden = counted(READING.activations(wide, HEAD, "float32").hidden)
    tiles = hidden.reshape(len(hidden), 64, DEMO.emb_size)
    together = np.square(tiles.sum(axis=1)).mean() / np.square(tiles).mean()
    assert together < 64 * 2  # 64 if they are independent, 64^2 if they are alike


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_graph_is_given_numbers_that_its_dtype_has(dtype: Any) -> None:
    graph = GraphName(kind="layer", layer=1)
    given = READING.activations(DEMO, graph, dtype)
    exact = READING.activations(DEMO, graph, "float32")
    for array, whole in zip((*given.hidden, given.keys), (*exact.hidden, exact.keys), strict=True):
        assert (array.astype(dtype).astype(np.float32) == array).all()
        assert (array != whole).any()


def test_the_last_step_is_so_faint_that_an_epsilon_shows() -> None:
    given = READING.activations(DEMO, GraphName(kind="layer", layer=1), "float32")
    squares = [np.square(hidden).mean(axis=-1).max() for hidden in given.hidden]
    assert squares[-1] < DEMO.rms_norm_eps
    assert min(squares[:-1]) > 1e4 * DEMO.rms_norm_eps


def feeds(**changes: Any) -> Iterator[dict[str, Any]]:
    """Yield inputs of a layer of tiny, with some changed."""
    config = load_golden(FIXTURES[0]).config
    cache = np.ones((2, config.num_kv_heads, 9, config.key_size), np.float32)
    yield {
        "h": np.ones((2, 4, config.emb_size), np.float32),
        "start": np.array([0, 5]),
        "k_cache": cache,
        "v_cache": cache,
    } | changes


def test_all_tokens_of_given_inputs_count(bundle_of: BundleOf) -> None:
    path = bundle_of("tiny").folder / "layer_00.onnx"
    inputs = GivenInputs(path, itertools.chain(feeds(), feeds(start=np.array([5, 0]))))
    fed = list(inputs)
    assert len(fed) == len(inputs.steps) == 2
    assert inputs.steps[0].counts.all()
    assert (inputs.steps[1].start == [5, 0]).all()
    assert (inputs[1]["start"] == [5, 0]).all()


@pytest.mark.parametrize(
    ("file", "feed", "text"),
    [
        ("layer_00.onnx", {"start": np.array([0, 6])}, "start is 0 to 6; .* it is 0 to 5"),
        ("layer_00.onnx", {"start": np.array([-1, 0])}, "start is -1 to 0"),
        (
            "embedding.onnx",
            {"tokens": np.array([[3, 512]])},
            "tokens are 3 to 512; ids are 0 to 511",
        ),
        ("embedding.onnx", {"tokens": np.array([[-1]])}, "tokens are -1 to -1"),
        ("head.onnx", {"last": np.array([0, 4])}, "last is 0 to 4; of 4 tokens it is 0 to 3"),
    ],
)
def test_given_inputs_that_no_graph_can_meet_are_refused(
    file: str, feed: dict[str, Any], text: str, bundle_of: BundleOf
) -> None:
    whole = next(feeds(**feed))
    if file == "embedding.onnx":
        whole = feed
    if file == "head.onnx":
        whole = {"h": whole["h"], **feed}
    inputs = GivenInputs(bundle_of("tiny").folder / file, [whole])
    with pytest.raises(PolygraphyException, match=text):
        list(inputs)


def test_a_data_loader_is_told_what_inputs_there_are(bundle_of: BundleOf) -> None:
    class Loader(list[Any]):
        input_metadata: object = None

    loader = Loader()
    inputs: Any = GivenInputs(bundle_of("tiny").folder / "head.onnx", loader)
    inputs.input_metadata = "these"
    assert loader.input_metadata == "these"
    inputs = GivenInputs(bundle_of("tiny").folder / "head.onnx", iter([]))
    inputs.input_metadata = "these"  # nobody is told


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    for inputs in (GraphInputs, lambda path: GivenInputs(path, [])):
        with pytest.raises(PolygraphyException, match="is no file"):
            inputs(tmp_path / "layer_00.onnx")
