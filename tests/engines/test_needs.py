"""What engines need, by hand where it is counted, and beside what was measured at full size."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from export_grok.artifacts import Bundle
from export_grok.config import GROK_1, EngineOptions, GrokConfig
from export_grok.engines.backend import (
    build_needs,
    functions_needs,
    probe_needs,
    session_needs,
)
from export_grok.engines.demand import Demand, Graphs
from export_grok.engines.trt.memory import memory_of
from export_grok.engines.trt.record import Sizes
from export_grok.errors import NeedsError
from export_grok.machine import this_machine
from export_grok.plugins.kernels import CHOICE, native_kernels
from tests.engines.fake_driver import GIB, Card, FakeMachine, machine_of
from tests.engines.trt.records import bundle_with, record_for

GB = 10**9
ORT_NEEDS = "export_grok.engines.ort.needs"
NO_KERNELS = "there are no native kernels here"

FullSize = Callable[[int], Bundle]


@pytest.fixture
def bundle(tiny_config: GrokConfig, tmp_path: Path) -> Bundle:
    """Return what a session reads of an engine of ONNX Runtime."""
    found = bundle_with(record_for(tiny_config, Sizes()), "tiny", tmp_path / "bundle")
    manifest = dataclasses.replace(found.manifest, backend="ort", engine={})
    return dataclasses.replace(found, manifest=manifest)


@pytest.fixture
def full_size(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> FullSize:
    """Return the way to a bundle of so many layers, on no disk and on the machine of the docs."""
    machine = dataclasses.replace(this_machine(), cores=2)
    monkeypatch.setattr(f"{ORT_NEEDS}.this_machine", lambda: machine)
    monkeypatch.setattr(f"{ORT_NEEDS}.available_memory", lambda: 20 * GB)

    def full_size(layers: int) -> Bundle:
        config = dataclasses.replace(GROK_1, num_layers=layers)
        manifest = dataclasses.replace(bundle.manifest, config=config)
        return dataclasses.replace(bundle, manifest=manifest)

    return full_size


def asked(prefill: int, decode: int, *, whole: bool = True) -> Demand:
    """Return what `logits` and `bench` ask: all logits, or the last."""
    return Demand(
        batch=1,
        max_length=prefill + decode,
        prefill=prefill,
        decode=decode,
        chunk=256,
        whole=whole,
    )


@pytest.mark.parametrize(
    ("layers", "demand", "gigabytes", "seconds"),
    [  # docs/scale.md and docs/performance.md; private memory less the array of all logits
        (1, asked(4, 4), 0.08, 1.4),
        (1, asked(8, 0), 0.12, 5.8),
        (1, asked(128, 0), 0.30, None),
        (1, asked(512, 0), 0.74, None),
        (64, asked(0, 2), 0.10, 68.7),
    ],
)
@pytest.mark.skipif(native_kernels().library is None, reason=NO_KERNELS)
def test_estimates_are_near_what_was_measured_with_native_kernels(
    layers: int, demand: Demand, gigabytes: float, seconds: float | None, full_size: FullSize
) -> None:
    needs = session_needs(full_size(layers), demand)
    assert 0.5 * gigabytes < needs.memory / GB < 2 * gigabytes
    if seconds is not None:
        assert seconds / 3 < needs.seconds < 3 * seconds


def test_built_in_kernels_hold_layers_and_head_once_more(
    full_size: FullSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CHOICE, "builtin")
    needs = session_needs(full_size(1), asked(4, 4))
    assert 8.0 < needs.memory / GB < 8.4  # measured: 8.01
    assert 14.0 / 3 < needs.seconds < 3 * 14.0
    two = session_needs(full_size(2), asked(4, 4))
    assert 4.9 < (two.memory - needs.memory) / GB < 5.0
    one_graph = probe_needs(full_size(2))
    assert 4.9 < one_graph.memory / GB < 5.1


def test_the_cache_is_that_of_all_rows_and_layers(full_size: FullSize) -> None:
    short, long = (
        session_needs(full_size(64), Demand(batch=3, max_length=length, decode=1)).memory
        for length in (1, 8192)
    )
    assert long - short == 64 * 2 * 3 * 8191 * 8 * 128 * 4


def test_weights_that_memory_does_not_hold_are_read_at_the_pace_of_the_disk(
    full_size: FullSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = session_needs(full_size(1), asked(0, 100)).seconds
    monkeypatch.setattr(f"{ORT_NEEDS}.available_memory", lambda: 5 * GB)
    assert session_needs(full_size(1), asked(0, 100)).seconds > 10 * small


def test_function_bodies_widen_all_experts(full_size: FullSize) -> None:
    floats = 4 * 8 * 3 * 6144 * 32768
    assert functions_needs(full_size(64), 1).memory > 4 * floats
    assert functions_needs(full_size(64), 64).memory > 63 * functions_needs(full_size(2), 1).memory


def test_ranks_take_the_disk_of_their_weights_less_what_a_run_broken_off_has_left(
    bundle: Bundle, tmp_path: Path
) -> None:
    graphs = dataclasses.replace(Graphs.of_bundle(bundle), folder=tmp_path, manifest=None)
    options = EngineOptions(tensor_parallel=2)
    lowered, weights = build_needs("ort", graphs, options).disk
    assert weights.folder == lowered.folder == tmp_path
    whole = sum(weight.nbytes for weight in graphs.index)
    assert whole < weights.nbytes < 1.2 * whole  # what ranks do not share, each has
    (tmp_path / "rank_1").mkdir()
    (tmp_path / "rank_1" / "layer_01.weights").write_bytes(bytes(1000))  # of a run broken off
    _, rest = build_needs("ort", graphs, options).disk
    assert rest.nbytes == weights.nbytes - 1000


@pytest.mark.parametrize("ranks", [1, 2])
def test_plans_need_a_rank_s_memory_of_the_fullest_gpu(
    ranks: int, tiny_config: GrokConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(tensor_parallel=ranks, chunk=8, max_length=32)
    bundle = bundle_with(record_for(tiny_config, sizes), "tiny", tmp_path)
    asked = Demand(batch=1, max_length=32)
    memory = memory_of(tiny_config.for_rank(ranks), sizes, "float32", "float32").total

    machine_of(monkeypatch, FakeMachine(cards=[Card(free=7 * GIB), Card(free=memory - 1)]))
    needs = session_needs(bundle, asked)
    assert (needs.gpu_memory, needs.gpus) == (memory, ranks)
    assert needs.gpu_memory_free == (7 * GIB if ranks == 1 else memory - 1)
    if ranks == 2:
        with pytest.raises(NeedsError, match="one of 2 GPUs has 0 MB of free memory; 1 MB are"):
            needs.check()
    assert probe_needs(bundle).gpu_memory < memory

    for none in (None, FakeMachine(cards=[]), FakeMachine(cards=[Card()] * ranks, nvml=False)):
        machine_of(monkeypatch, none)
        assert session_needs(bundle, asked).gpu_memory_free is None
