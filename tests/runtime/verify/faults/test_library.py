"""Every fault says what it is, where it shows, and how it is asked for."""

import pytest

from export_grok.errors import ConfigError
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.library import FAULTS, fault_named
from export_grok.runtime.verify.tolerances import FREE_RUN, TENSORS
from tests.documents import ROOT

PLACES = {"embedding": {"h"}, "head": {"logits"}}
LAYER = TENSORS.keys() - {"h", "logits", FREE_RUN}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_shows_in_a_tensor_of_its_graph(fault: Fault) -> None:
    assert fault.shows in PLACES.get(fault.graph, LAYER)
    assert len(fault.title) < 100
    assert not fault.title.endswith(".")


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_planted_in_one_way(fault: Fault) -> None:
    ways = (fault.plant, fault.weights_of, fault.of_ranks)
    assert sum(way is not None for way in ways) == 1


def test_the_faults_that_are_known_as_plants_only() -> None:
    assert {name for name, fault in FAULTS.items() if fault.mistake is None} == {
        "corrupted_block",
        "wrong_slice",
        "sum_left_out",
    }


def test_a_fault_is_found_by_its_name_and_a_wrong_one_told_the_nearest() -> None:
    assert fault_named("exact_gelu") is FAULTS["exact_gelu"]
    with pytest.raises(ConfigError, match=r"no fault 'exact-gelo'; did you mean 'exact_gelu'\?"):
        fault_named("exact-gelo")
    with pytest.raises(
        ConfigError, match="no fault 'xyz'; known are embedding_multiplier_missing"
    ):
        fault_named("xyz")


def test_the_readme_counts_them_right() -> None:
    assert f"of {len(FAULTS)} kinds" in (ROOT / "README.md").read_text(encoding="utf-8")
