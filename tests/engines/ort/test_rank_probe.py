"""The graphs of ranks, put together in one process, are those of the whole model."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from export_grok.artifacts import WEIGHT_INDEX, Bundle, open_bundle, rank_folder
from export_grok.config import EngineOptions
from export_grok.engines.backend import open_probe
from export_grok.engines.ort.build import build_engine
from export_grok.engines.ort.rank_probe import RankProbe
from export_grok.engines.probe import GraphName
from export_grok.errors import BundleError
from export_grok.weights import WeightIndex
from tests.bundles import BundleOf, traced
from tests.engines.graph_inputs import SLOTS, Arrays, distances, inputs_of, names_of, ran, written
from tests.engines.ort.test_ranks import Together

LAYER = GraphName(kind="layer", layer=1)
EMBEDDING = GraphName(kind="embedding")
# Of the root mean square of a tensor: sums of other lengths, in another order. Built-in kernels
# leave out other digits where a rank's part of a matrix is rounded on its own.
CLOSE = {"native": 1e-5, "builtin": 5e-5}


@pytest.fixture(scope="module")
def two(bundle_of: BundleOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """Return a bundle of two ranks. Leave it as it is."""
    whole = bundle_of("tiny8")
    folder = tmp_path_factory.mktemp("ranks") / "bundle"
    shutil.copytree(whole.folder, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("export_grok.export.trace.template_from_config", traced)
        graphs = open_bundle(folder, weights_root=whole.weights_root)
        yield build_engine(graphs, EngineOptions(tensor_parallel=2))


@pytest.fixture
def own(two: Bundle, tmp_path: Path) -> Bundle:
    """Return a copy to change."""
    shutil.copytree(two.folder, tmp_path / "own")
    return dataclasses.replace(two, folder=tmp_path / "own")


def test_every_output_and_tap_is_that_of_one_rank(
    kernels: str, two: Bundle, bundle_of: BundleOf
) -> None:
    alone, ranks = open_probe(bundle_of("tiny8"), threads=1), open_probe(two, threads=1)
    assert isinstance(ranks, RankProbe)
    assert "2 ranks" in ranks.name
    assert ("built-in" in ranks.name) == (kernels == "builtin")
    for graph in (EMBEDDING, LAYER, GraphName(kind="head"), GraphName(kind="head_all")):
        with alone.graph(graph) as run_alone, ranks.graph(graph) as run_ranks:
            for tokens in (5, 1):
                inputs = inputs_of(alone.config, graph, tokens)
                wanted, found = run_alone(inputs), run_ranks(inputs)
                assert found.keys() == wanted.keys()
                for name, array in found.items():
                    assert (array.shape, array.dtype) == (wanted[name].shape, wanted[name].dtype)
                far = distances(found, wanted)
                assert far.pop("experts", 0) == 0
                assert max(far.values()) < CLOSE[kernels], (str(graph), tokens, far)


def test_graphs_one_after_the_other_give_the_logits_of_ranks(kernels: str, two: Bundle) -> None:
    config, probe = two.config, open_probe(two, threads=1)
    together = Together(two, 2, 3, SLOTS)
    for session in together.sessions:
        for array in (*session.keys, *session.values):
            array[:] = 0
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (3, 5))
    h = ran(probe, EMBEDDING, {"tokens": ids})["h"]
    cache = np.zeros((3, config.num_kv_heads, SLOTS, config.key_size), np.float32)
    start = np.zeros(3, np.int64)
    for graph in names_of(config):
        if graph.kind == "layer":
            inputs = {"h": h, "start": start, "k_cache": cache, "v_cache": cache}
            h = ran(probe, graph, inputs)["h_out"]
    logits = ran(probe, GraphName(kind="head_all"), {"h": h})["logits"]
    wanted = together.forward_all(ids, start)
    if kernels == "native":
        assert np.array_equal(logits, wanted)
    # With taps as outputs ONNX Runtime may fuse less of what its own kernels compute.
    assert distances({"logits": logits}, {"logits": wanted})["logits"] < 1e-5


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tokens", [5, 1])
def test_what_is_given_stays_and_only_slots_of_new_tokens_are_written(
    tokens: int, two: Bundle
) -> None:
    probe = open_probe(two, threads=1)
    inputs = inputs_of(probe.config, LAYER, tokens)
    kept = {name: array.copy() for name, array in inputs.items()}
    found = ran(probe, LAYER, inputs)
    assert all(np.array_equal(inputs[name], array) for name, array in kept.items())
    for cache, output in (("k_cache", "k_out"), ("v_cache", "v_out")):
        old, new = (array.transpose(0, 2, 1, 3) for array in (inputs[cache], found[output]))
        assert np.array_equal(old[~written(tokens)], new[~written(tokens)])
        assert (old[written(tokens)] != new[written(tokens)]).mean() > 0.99


def spoil(bundle: Bundle, rank: int, name: str) -> None:
    """Turn the values of a rank's weight round."""
    folder = bundle.folder / rank_folder(rank)
    weight = WeightIndex.read(folder / WEIGHT_INDEX, root=folder)[name]
    data = np.memmap(folder / weight.file, np.uint8, "r+", weight.offset, weight.nbytes)
    data[:] = data.reshape(-1, 4)[::-1].reshape(-1)
    data.flush()


def changed(own: Bundle, two: Bundle) -> Arrays:
    """Return the outputs and taps that are other numbers than they should be."""
    inputs = inputs_of(two.config, LAYER, 5)
    found, wanted = (ran(open_probe(one, threads=1), LAYER, inputs) for one in (own, two))
    return {
        name: array for name, array in found.items() if not np.array_equal(array, wanted[name])
    }


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_chooses_other_experts_shows_whichever_it_is(
    rank: int, own: Bundle, two: Bundle
) -> None:
    spoil(own, rank, "layers.1.router.weight")
    found = changed(own, two)
    assert found.keys() == {"probabilities", "gates", "experts", "moe", "h_out"}
    assert np.isnan(found["gates"]).any()
    assert (found["experts"] == -1).any()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_normalises_otherwise_shows_whichever_it_is(
    rank: int, own: Bundle, two: Bundle
) -> None:
    spoil(own, rank, "layers.1.post_moe_norm.scale")
    found = changed(own, two)
    assert found.keys() == {"h_out"}
    assert np.isnan(found["h_out"]).any()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_of_a_matrix_that_is_wrong_shows(rank: int, own: Bundle, two: Bundle) -> None:
    spoil(own, rank, "layers.1.attention.value.weight")
    found = changed(own, two)
    assert {"v_out", "heads", "attention", "h_out"} < found.keys()
    assert "k_out" not in found


@pytest.mark.usefixtures("kernels")
def test_a_damaged_part_is_named_and_no_other_graph_is_touched(kernels: str, own: Bundle) -> None:
    name = f"layer_01.1{'.ort' * (kernels == 'builtin')}.onnx"
    (own.folder / "ranks" / name).write_bytes(b"no graph")
    probe = open_probe(own, threads=1)
    with pytest.raises(BundleError, match=name), probe.graph(LAYER):
        pass
    assert ran(probe, EMBEDDING, inputs_of(probe.config, EMBEDDING, 1))


def test_weights_of_a_rank_that_are_gone_are_told(own: Bundle) -> None:
    (own.folder / "rank_1" / "layer_01.weights").unlink()
    probe = open_probe(own, threads=1)
    with pytest.raises(BundleError, match=r"layer_01.*does not load"), probe.graph(LAYER):
        pass
