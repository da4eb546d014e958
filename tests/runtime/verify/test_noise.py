"""The tolerances that are shipped, against what right engines are off by."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from export_grok.artifacts import Bundle
from export_grok.engines.backend import open_functions, open_probe
from export_grok.engines.probe import Probe
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.result import Deviation
from export_grok.runtime.verify.rows import rows_of
from export_grok.runtime.verify.steps import faint, steps_of
from export_grok.runtime.verify.tolerances import FREE_RUN, TENSORS, tolerances_of
from export_grok.runtime.verify.walk import walk
from tests.bundles import BundleOf

MODELS = ("demo", "tiny", "tiny8")

# Both sides compute them in the same way: gathered and scaled, or counted.
EXACT = {"h", "experts"}


@pytest.fixture(scope="module")
def noise(bundle_of: BundleOf) -> dict[str, list[float]]:
    """Return of every tensor the parts of its tolerance that right engines are off by.

    They run by native kernels, if there are any, by built-in ones, and by function bodies.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    for kernels in ("", "builtin"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EXPORT_GROK_KERNELS", kernels)
            for name in MODELS:
                bundle = bundle_of(name)
                probes = [open_probe(bundle, threads=1)]
                if not kernels:
                    probes.append(open_functions(bundle, threads=1))
                for probe in probes:
                    for one in deviations(bundle, probe):
                        parts[one.tensor].append(one.ratio)
    return parts


def deviations(bundle: Bundle, probe: Probe) -> Iterator[Deviation]:
    rows = rows_of(bundle, prompt=20, tokens=2, batch=3).rows
    steps = steps_of(rows, decode=2, chunk=12, max_length=22)
    for result, _, _ in walk(
        TorchProbe.of_bundle(bundle),
        probe,
        (*steps, faint(steps[0])),
        tolerances_of(bundle.config),
        max_length=22,
    ):
        yield from result.deviations


@pytest.mark.parametrize("tensor", [name for name in TENSORS if name != FREE_RUN])
def test_right_engines_are_within_the_tolerance_with_room_to_spare(
    noise: dict[str, list[float]], tensor: str
) -> None:
    assert max(noise[tensor]) < 0.9


@pytest.mark.parametrize("tensor", [name for name in TENSORS if name not in EXACT | {FREE_RUN}])
def test_the_tolerance_is_at_most_ten_times_what_right_engines_are_off_by(
    noise: dict[str, list[float]], tensor: str
) -> None:
    assert max(noise[tensor]) > 0.1
