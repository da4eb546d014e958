"""The strongest law: an engine with a fault computes what the reference computes with it.

Both are far from what is right, and first in the tensor that the fault is said to show in. So the
fault is the one that is meant, on both sides.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from export_grok.engines.backend import open_probe
from export_grok.engines.probe import GraphName
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.mistake import mistaken
from export_grok.runtime.verify.faults.planting import plant_fault, why_not
from tests.runtime.verify.faults.conftest import MODELS, Arrays, Feed, FeedOf, graphs_of

FAR = 10  # tolerances; two sides that make the same mistake are within one

GRAPH_FAULTS = [fault for fault in FAULTS.values() if fault.of_ranks is None]
BUILTIN = [
    "output_multiplier_missing",
    "no_post_norms",
    "v_rotated",
    "no_attention_soft_cap",
    "a_slot_too_far",
    "exact_gelu",
    "two_experts_exchanged",
    "scale_groups_interleaved",
    "corrupted_block",
]


def assert_same(
    feed: Feed, name: GraphName, found: Sequence[Arrays], wanted: Sequence[Arrays]
) -> None:
    """Hold one side to the other within the tolerances, and in every slot of the caches."""
    assert not feed.failed(name, found, wanted, slots=False)
    for left, right in zip(found, wanted, strict=True):
        for cache in left.keys() & {"k_out", "v_out"}:
            np.testing.assert_allclose(left[cache], right[cache], rtol=1e-4, atol=1e-4)


def assert_wrong(feed: Feed, name: GraphName, found: Sequence[Arrays], shows: str) -> None:
    """Hold one side to be far from what is right, and first in the tensor `shows`.

    First in the step where it is most wrong: an epsilon may pass for rounding in all but a faint
    one, until it has gone through the whole layer.
    """
    failed = feed.failed(name, found, feed.right[name])
    assert failed
    worst = max(failed, key=lambda one: one.ratio).step
    assert next(one for one in failed if one.step == worst).tensor == shows
    assert max(one.ratio for one in failed if one.tensor == shows) > FAR


def check(fault: Fault, feed: Feed, folder: Path) -> None:
    """Hold both sides of a fault to the law."""
    bundle = feed.bundle
    planted = open_probe(plant_fault(bundle, fault, folder))
    for name in graphs_of(fault, bundle.config.num_layers):
        found = feed.outputs(planted, name)
        assert_wrong(feed, name, found, fault.shows)
        if fault.mistake is not None:
            with mistaken(fault, TorchProbe.of_bundle(bundle)) as wrong:
                wanted = feed.outputs(wrong, name)
            assert_wrong(feed, name, wanted, fault.shows)
            assert_same(feed, name, found, wanted)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("fault", GRAPH_FAULTS, ids=lambda fault: str(fault.name))
def test_native_kernels_and_the_reference_make_the_same_mistake(
    fault: Fault, feed_of: FeedOf, tmp_path: Path
) -> None:
    check(fault, feed_of(MODELS.get(fault.name, "tiny8")), tmp_path / "planted")


@pytest.mark.usefixtures("builtin")
@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_kernels_and_the_reference_make_the_same_mistake(
    name: str, feed_of: FeedOf, tmp_path: Path
) -> None:
    check(FAULTS[name], feed_of("tiny8"), tmp_path / "planted")


@pytest.mark.parametrize("kernels", ["native", "builtin"])
def test_without_a_fault_the_engine_computes_what_is_right(
    kernels: str, feed_of: FeedOf, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(kernels)
    feed = feed_of("tiny8")
    for name in feed.inputs:
        assert_same(feed, name, feed.outputs(open_probe(feed.bundle), name), feed.right[name])


def test_what_is_harmless_in_a_model_changes_nothing_there(feed_of: FeedOf) -> None:
    seen = set()
    for feed in (feed_of("tiny"), feed_of("tiny8")):
        right = TorchProbe.of_bundle(feed.bundle)
        for fault in GRAPH_FAULTS:
            if fault.mistake is None or not fault.harmless(feed.bundle.config):
                continue
            seen.add(fault.name)
            assert "no mistake for this model" in (why_not(fault, feed.bundle) or "")
            for name in graphs_of(fault, feed.bundle.config.num_layers):
                with mistaken(fault, right) as wrong:
                    assert_same(feed, name, feed.outputs(wrong, name), feed.right[name])
    assert seen == {
        "layers_in_numeric_order",
        "root_of_head_size_for_multiplier",
        "scale_groups_interleaved",
        "only_first_scale_group",
        "scales_of_the_next_group",
    }
