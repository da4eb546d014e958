"""Every known mistake in an engine turns polygraphy's comparison red, with nothing set."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polygraphy.comparator import Comparator

from export_grok.artifacts import Bundle, graph_file
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.planting import PLANTED, plant_fault, why_not
from export_grok.runtime.verify.poly.data import GraphInputs
from export_grok.runtime.verify.poly.graph_compare import GraphCompare
from export_grok.runtime.verify.poly.graph_runners import ort_runner, ref_runner
from tests.bundles import BundleOf
from tests.runtime.verify.poly.conftest import graphs_of, passes

pytestmark = pytest.mark.usefixtures("quiet")

Held = Callable[[Path, Path], bool]

# Where the demo has too few layers, or just the multiplier that the mistake is.
MODELS = {"layers_in_numeric_order": "deep13", "root_of_head_size_for_multiplier": "tiny"}


@pytest.fixture(scope="module")
def held() -> Held:
    """Return what holds a graph to the reference of another one, which is run once."""

    @functools.cache
    def reference(right: Path) -> tuple[GraphInputs, Any]:
        inputs = GraphInputs(right)
        return inputs, Comparator.run([ref_runner(right)], data_loader=inputs)

    def held(graph: Path, right: Path) -> bool:
        inputs, wanted = reference(right)
        found = Comparator.run([ort_runner(graph)], data_loader=inputs)
        return passes([wanted, found], GraphCompare(inputs))

    return held


def wrong_graphs(planted: Bundle, fault: Fault) -> list[str]:
    """Return the files of the graphs that compute wrongly."""
    kinds = ("head", "head_all") if fault.graph == "head" else (fault.graph,)
    return [graph_file(kind, planted.manifest.engine[PLANTED]["layer"]) for kind in kinds]


@pytest.mark.parametrize("name", ["demo", "tiny", "deep13"])
def test_without_a_fault_every_graph_passes(name: str, bundle_of: BundleOf, held: Held) -> None:
    for path in graphs_of(bundle_of(name)):
        assert held(path, path), path


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: str(fault.name))
def test_a_fault_is_seen(
    fault: Fault, bundle_of: BundleOf, of_ranks: Bundle, held: Held, tmp_path: Path
) -> None:
    bundle = of_ranks if fault.of_ranks else bundle_of(MODELS.get(fault.name, "demo"))
    assert why_not(fault, bundle) is None
    planted = plant_fault(bundle, fault, tmp_path / "planted")
    for name in wrong_graphs(planted, fault):
        assert not held(planted.folder / name, bundle.folder / name), name
