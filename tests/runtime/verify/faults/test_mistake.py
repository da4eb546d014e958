"""A mistake lasts as long as its block, and leaves no trace."""

import pytest

from export_grok.engines.probe import GraphName
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.mistake import mistaken
from tests.runtime.verify.faults.conftest import FeedOf, graphs_of

MISTAKES = [fault for fault in FAULTS.values() if fault.mistake is not None]


def right_again(feed_of: FeedOf, name: GraphName, probe: TorchProbe) -> bool:
    feed = feed_of("tiny8")
    return all(
        (left[key] == right[key]).all()
        for left, right in zip(feed.outputs(probe, name), feed.right[name], strict=True)
        for key in right
    )


@pytest.mark.parametrize("fault", MISTAKES, ids=lambda fault: str(fault.name))
def test_what_was_changed_is_undone_behind_an_error_too(fault: Fault, feed_of: FeedOf) -> None:
    bundle = feed_of("tiny8").bundle
    probe = TorchProbe.of_bundle(bundle)
    config, weights = probe.config, dict(probe.index.weights)
    with pytest.raises(KeyError), mistaken(fault, probe) as wrong:
        assert wrong.name == f"PyTorch, float32, {fault.name}"
        raise KeyError
    assert (probe.config, probe.index.weights) == (config, weights)
    for name in graphs_of(fault, bundle.config.num_layers):
        assert right_again(feed_of, name, probe)


def test_mistakes_may_be_made_together(feed_of: FeedOf) -> None:
    feed, name = feed_of("tiny8"), GraphName(kind="layer", layer=1)
    with mistaken(FAULTS["v_rotated"], TorchProbe.of_bundle(feed.bundle)) as one:
        with mistaken(FAULTS["cap_of_20"], one) as two:
            both = feed.outputs(two, name)
        alone = feed.outputs(one, name)
    tensors = [feed.failed(name, found, feed.right[name])[0].tensor for found in (both, alone)]
    assert tensors == ["v_out", "v_out"]
    assert feed.failed(name, both, alone)[0].tensor == "heads"


def test_a_plant_that_is_no_mistake_of_the_model_is_refused(feed_of: FeedOf) -> None:
    probe = TorchProbe.of_bundle(feed_of("tiny8").bundle)
    with (
        pytest.raises(ValueError, match="corrupted_block is no mistake of the model"),
        mistaken(FAULTS["corrupted_block"], probe),
    ):
        raise AssertionError("the block ran")
