"""One graph at a time gives what a session computes, and shows what it computes on the way."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from export_grok.artifacts import Bundle, graph_file
from export_grok.engines.backend import open_functions, open_probe
from export_grok.engines.ort.session import open_engine
from export_grok.engines.probe import TAPS, GraphName, Probe
from export_grok.errors import BundleError, ConfigError
from export_grok.runtime.torch_probe import TorchProbe
from tests.bundles import BundleOf, graphs_changed
from tests.engines.graph_inputs import (
    SLOTS,
    START,
    Arrays,
    distances,
    inputs_of,
    names_of,
    ran,
    written,
)
from tests.engines.ort.conftest import VARIANTS
from tests.engines.ort.logits import last_logits

# Of the root mean square of a tensor. What the built-in kernels leave out of activations is most
# of it; see `logits.TOLERANCE`.
CLOSE = {"native": 4e-5, "builtin": 1e-4}
LAYER = GraphName(kind="layer", layer=1)


def compare(probe: Probe, bundle: Bundle, close: float) -> None:
    """Hold every graph to PyTorch, in prefill and in decode; all taps are there."""
    reference = TorchProbe.of_bundle(bundle)
    for graph in names_of(probe.config):
        with reference.graph(graph) as right, probe.graph(graph) as run:
            for tokens in (5, 1):
                inputs = inputs_of(probe.config, graph, tokens)
                wanted, found = right(inputs), run(inputs)
                assert found.keys() == wanted.keys()
                far = distances(found, wanted)
                assert far.pop("experts", 0) == 0
                assert max(far.values()) < close, (str(graph), tokens, far)


@pytest.mark.parametrize("name", ["tiny8", "demo"])
def test_every_output_and_tap_is_that_of_pytorch(
    name: str, kernels: str, bundle_of: BundleOf
) -> None:
    probe = open_probe(bundle_of(name), threads=1)
    assert ("built-in" in probe.name) == (kernels == "builtin")
    compare(probe, bundle_of(name), CLOSE[kernels])


def test_function_bodies_give_every_output_and_tap_of_pytorch(bundle_of: BundleOf) -> None:
    probe = open_functions(bundle_of("tiny8"), threads=1)
    assert "function bodies" in probe.name
    compare(probe, bundle_of("tiny8"), 4e-5)


@pytest.mark.usefixtures("kernels")
def test_outputs_and_taps_have_the_shapes_that_are_documented(bundle_of: BundleOf) -> None:
    probe = open_probe(bundle_of("tiny8"), threads=1)
    config, rows, tokens = probe.config, len(START), 5
    inputs = inputs_of(config, LAYER, tokens)
    chosen, hidden = (rows, tokens, config.num_selected_experts), (rows, tokens, config.emb_size)
    wanted = {
        "h_out": hidden,
        "k_out": (rows, config.num_kv_heads, SLOTS, config.key_size),
        "v_out": (rows, config.num_kv_heads, SLOTS, config.key_size),
        "probabilities": (rows, tokens, config.num_experts),
        "heads": (rows, tokens, config.q_size),
        "attention": hidden,
        "gates": chosen,
        "experts": chosen,
        "moe": hidden,
    }
    found = ran(probe, LAYER, inputs)
    assert {name: array.shape for name, array in found.items()} == wanted
    assert set(TAPS) < wanted.keys()
    for name, array in found.items():
        assert array.dtype == (np.int64 if name == "experts" else np.float32)


@pytest.mark.parametrize("name", ["tiny8", "demo"])
def test_graphs_one_after_the_other_give_the_logits_of_a_session(
    name: str, kernels: str, bundle_of: BundleOf
) -> None:
    bundle = bundle_of(name)
    config, probe = bundle.config, open_probe(bundle, threads=1)
    session = open_engine(bundle, batch=2, max_length=SLOTS, threads=1)
    cache = (2, config.num_kv_heads, SLOTS, config.key_size)
    caches: dict[GraphName, Arrays] = {
        graph: {"k_cache": np.zeros(cache, np.float32), "v_cache": np.zeros(cache, np.float32)}
        for graph in names_of(config)
        if graph.kind == "layer"
    }
    start = np.array([0, 0])
    for tokens in (5, 4, 1):
        ids = np.random.default_rng(tokens).integers(0, config.vocab_size, (2, tokens))
        h = ran(probe, GraphName(kind="embedding"), {"tokens": ids})["h"]
        for graph, kept in caches.items():
            found = ran(probe, graph, {"h": h, "start": start, **kept})
            kept |= {"k_cache": found["k_out"], "v_cache": found["v_out"]}
            h = found["h_out"]
        last = np.array([tokens - 1, 0])
        logits = ran(probe, GraphName(kind="head"), {"h": h, "last": last})["logits"]
        every = ran(probe, GraphName(kind="head_all"), {"h": h})["logits"]
        wanted = session.forward_all(ids, start)
        if kernels == "native":
            assert np.array_equal(every, wanted)
            assert np.array_equal(logits, last_logits(session, ids, start, last))
        # With taps as outputs ONNX Runtime may fuse less of what its own kernels compute.
        assert distances({"logits": every}, {"logits": wanted})["logits"] < 1e-5
        rows = np.arange(2)
        assert distances({"logits": logits}, {"logits": wanted[rows, last]})["logits"] < 1e-5
        start = last + start + 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tokens", [5, 1])
def test_what_is_given_stays_as_it_is(tokens: int, bundle_of: BundleOf) -> None:
    probe = open_probe(bundle_of("tiny8"), threads=1)
    inputs = inputs_of(probe.config, LAYER, tokens)
    # Of any memory layout.
    inputs["k_cache"] = np.asfortranarray(inputs["k_cache"])
    kept = {name: array.copy() for name, array in inputs.items()}
    with probe.graph(LAYER) as run:
        first = run(inputs)
        before = {name: array.copy() for name, array in first.items()}
        run({**inputs, "h": inputs["h"] + 1})
    assert all(np.array_equal(inputs[name], array) for name, array in kept.items())
    assert all(np.array_equal(first[name], array) for name, array in before.items())
    assert not any(
        np.shares_memory(one, other) for one in first.values() for other in inputs.values()
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tokens", [5, 1])
def test_only_the_slots_of_the_new_tokens_are_written(tokens: int, bundle_of: BundleOf) -> None:
    probe = open_probe(bundle_of("tiny8"), threads=1)
    inputs = inputs_of(probe.config, LAYER, tokens)
    found = ran(probe, LAYER, inputs)
    for cache, output in (("k_cache", "k_out"), ("v_cache", "v_out")):
        old, new = (array.transpose(0, 2, 1, 3) for array in (inputs[cache], found[output]))
        assert np.array_equal(old[~written(tokens)], new[~written(tokens)])
        assert (old[written(tokens)] != new[written(tokens)]).mean() > 0.99


@pytest.mark.usefixtures("kernels")
def test_what_lies_behind_the_new_tokens_does_not_matter(bundle_of: BundleOf) -> None:
    probe = open_probe(bundle_of("tiny8"), threads=1)
    inputs = inputs_of(probe.config, LAYER, 5)
    poisoned = {name: array.copy() for name, array in inputs.items()}
    for name in ("k_cache", "v_cache"):
        for row, start in zip(poisoned[name], START, strict=True):
            row[:, start:] = np.nan
    with probe.graph(LAYER) as run:
        wanted, found = run(inputs), run(poisoned)
    for name in ("h_out", *TAPS):
        assert np.array_equal(found[name], wanted[name])


def blunt_last_norm(model: ir.Model) -> None:
    (node,) = (
        node
        for node in model.graph
        if len(node.inputs) > 1
        and node.inputs[1] is not None
        and node.inputs[1].name == "post_moe_norm.scale"
    )
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e3)


@pytest.mark.parametrize("changed", ["native", "builtin"])
def test_the_graphs_that_run_are_those_of_the_kernels_and_a_fault_shows_where_it_is(
    changed: str, kernels: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("tiny8")
    other = graphs_changed(bundle, tmp_path / "out", blunt_last_norm, variant=VARIANTS[changed])
    inputs = inputs_of(bundle.config, LAYER, 5)
    wanted, found = (ran(open_probe(one, threads=1), LAYER, inputs) for one in (bundle, other))
    differ = {name for name, array in wanted.items() if not np.array_equal(array, found[name])}
    assert differ == ({"h_out"} if kernels == changed else set())


# ---- refused


def copied(bundle: Bundle, folder: Path) -> Bundle:
    shutil.copytree(bundle.folder, folder)
    return dataclasses.replace(bundle, folder=folder)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("content", [None, b"no graph", b""])
def test_a_damaged_graph_is_named_and_no_other_is_touched(
    content: bytes | None, kernels: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = copied(bundle_of("tiny8"), tmp_path / "out")
    name = graph_file("layer", 1, variant=VARIANTS[kernels])
    (bundle.folder / name).unlink()
    if content is not None:
        (bundle.folder / name).write_bytes(content)
    probe = open_probe(bundle, threads=1)
    with pytest.raises(BundleError, match=name), probe.graph(LAYER):
        pass
    other = GraphName(kind="layer", layer=0)
    assert ran(probe, other, inputs_of(probe.config, other, 1))


@pytest.mark.usefixtures("kernels")
def test_weights_that_are_gone_are_told(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundle = dataclasses.replace(bundle_of("tiny8"), weights_root=tmp_path)
    probe = open_probe(bundle, threads=1)
    with pytest.raises(BundleError, match=r"layer_01.*does not load"), probe.graph(LAYER):
        pass


def test_function_bodies_of_bfloat16_graphs_are_refused_with_what_to_do(
    bundle_of: BundleOf,
) -> None:
    bundle = bundle_of("tiny8")
    narrow = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, dtype="bfloat16")
    )
    with pytest.raises(ConfigError, match=r"are bfloat16.*--against torch, or .*float32 engine"):
        open_functions(narrow)
