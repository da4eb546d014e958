"""How times become shares; on a fake GPU, for which every piece of work takes the same time."""

import dataclasses
import statistics

import numpy as np
import pytest

from scripts.gpu.bandwidth import (
    CACHES,
    Bandwidth,
    Measured,
    bandwidth,
    benchmark_cases,
    measure_case,
    outcome,
    reading,
)
from scripts.gpu.cases import Case, Matrix, combine, product
from scripts.gpu.inputs import Array
from scripts.gpu.traffic import traffic
from tests.scripts.fake_gpu import MILLISECONDS, FakeGpu, uncompiled

CASE = product("small", "float32", 1, Matrix(rows=16, columns=64), 1)
MB = 1e6


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def measured(gpu: FakeGpu, case: Case = CASE, rate: float = 1e6) -> Measured | None:
    return measure_case(gpu, case, uncompiled(case), random(), lambda: rate, samples=3)


def test_launches_go_through_more_bytes_than_the_cache_holds() -> None:
    moved = traffic(uncompiled(CASE), {})
    gpu = FakeGpu(l2_bytes=2 * moved)
    found = measured(gpu)
    assert found is not None
    assert found.copies == 2 * CACHES
    assert found.copies * moved >= CACHES * gpu.l2_bytes
    weights = [addresses[1] for addresses in gpu.launches]
    assert len(set(weights)) == found.copies
    for first in range(len(weights) - found.copies):
        assert len(set(weights[first : first + found.copies])) == found.copies
    assert len({addresses[-1] for addresses in gpu.launches}) == 1  # one output will do


def test_all_copies_hold_the_same() -> None:
    gpu = FakeGpu(l2_bytes=traffic(uncompiled(CASE), {}))
    assert measured(gpu) is not None
    weights = {addresses[1] for addresses in gpu.launches}
    contents = {gpu.at(address, 16 * 64).tobytes() for address in weights}
    assert len(weights) == CACHES
    assert len(contents) == 1
    assert len(set(contents.pop())) > 50, "times are never taken of zeros"


def test_what_is_larger_than_the_cache_needs_no_copy() -> None:
    found = measured(FakeGpu(l2_bytes=16))
    assert found is not None
    assert found.copies == 1


def test_a_share_is_bytes_over_time_over_the_rate_of_reading() -> None:
    found = measured(FakeGpu(l2_bytes=16), rate=1e4)
    assert found is not None
    moved = traffic(uncompiled(CASE), {})
    launches = round(1e3 * MILLISECONDS / found.microseconds[0])
    assert launches >= 1
    assert found.moved == moved
    assert found.shares[0] == pytest.approx(moved / (MILLISECONDS / launches) / 1e4)
    assert found.rate == pytest.approx(moved / (MILLISECONDS / launches) / 1e6)


def test_what_does_not_fit_is_left_out() -> None:
    assert measured(FakeGpu(free=1 << 20)) is None


def test_reading_is_held_to_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.gpu.bandwidth.READ_BYTES", 1 << 20)
    gpu = FakeGpu()
    read = reading(gpu, random())
    assert read() == (1 << 20) / MILLISECONDS
    found = bandwidth(gpu, read, samples=3)
    assert found.read == pytest.approx((1 << 20) / MILLISECONDS / MB)
    assert found.copy == pytest.approx(2 * found.read)

    def forgets_some(outputs: list[Array]) -> list[Array]:
        outputs[0].view(np.uint32)[0, 0] ^= 1
        return outputs

    with pytest.raises(AssertionError, match="has not read"):
        reading(FakeGpu(change=forgets_some), random())


def test_medians_are_reported_and_the_middle_half_beside_them() -> None:
    found = measured(FakeGpu(l2_bytes=16))
    assert found is not None
    found = dataclasses.replace(
        found, moved=10**9, microseconds=(400.0, 500.0, 9000.0), shares=(0.9, 0.8, 0.1)
    )
    made = outcome("Card", [found], ["too large"], Bandwidth(read=2000.0, copy=1900.0))
    assert made.status == "pass"
    assert "Card: 2000 GB/s read, 1900 GB/s copied" in made.text
    assert "not measured: too large" in made.text
    row = made.table.splitlines()[-1]
    assert "| 1000.0 | 500.0 | 2000 | 80% | 45%-85% |" in row
    assert statistics.median(made.figures["kernels"][0]["shares"]) == 0.8
    assert outcome("Card", [], ["all"], Bandwidth(read=1.0, copy=1.0)).status == "fail"


def test_every_node_is_measured_for_each_batch() -> None:
    cases = benchmark_cases("bfloat16")
    nodes = {case.op_type for case in cases}
    for ranks in (1, 8):
        for batch in (1, 4, 8):
            found = {case.op_type for case in cases if f"TP {ranks}, B {batch}" in case.use}
            assert found == nodes - {"GrokInt8Matrix"}
    assert len({case.name for case in cases}) == len(cases)
    assert combine("x", "float32", (1, 1, 1, 1, 16)).op_type in nodes
