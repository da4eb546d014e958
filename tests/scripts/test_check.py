"""The check of kernels: it passes right ones, as the interpreter runs them, and no wrong one."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import Dtype
from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.errors import BuildError
from export_grok.plugins.registry import plugin_nodes
from scripts.gpu.cases import Case, Matrix, combine, down, gate_up, odd_cases, product, split
from scripts.gpu.cases import dequantised as matrix_case
from scripts.gpu.check import Checked, all_cases, check_case, check_cases, outcome
from scripts.gpu.launch import GUARD, arguments
from scripts.gpu.step import Options
from tests.scripts.fake_gpu import FakeGpu, uncompiled

Array = NDArray[Any]
OPTIONS = Options(rounds=1, folder="")

SMALL = Matrix(rows=40, columns=33, groups=5)
EXPERTS = Matrix(rows=12, columns=21, groups=2, experts=2)


def cases(dtype: Dtype) -> dict[str, Case]:
    """Return one quick call of each node."""
    return {
        "product": product("small", dtype, 3, SMALL, 2),
        "matrix": matrix_case("small", dtype, EXPERTS),
        "gate-up": gate_up("small", dtype, (1, 2), EXPERTS),
        "down": down("small", dtype, (1, 2), EXPERTS, 2),
        "split": split("small", dtype, (2, 2, 70, 16), 3, 3, 0.3),
        "combine": combine("small", dtype, (2, 2, 3, 3, 16)),
    }


def checked(case: Case, gpu: FakeGpu | None = None, **changes: Any) -> Checked:
    options = dataclasses.replace(OPTIONS, **changes)
    return check_case(gpu or FakeGpu(), case, uncompiled(case), np.random.default_rng(1), options)


def test_each_node_has_a_case_here_and_on_the_gpu() -> None:
    nodes = set(plugin_nodes())
    assert {case.op_type for case in cases("float32").values()} == nodes
    assert {case.op_type for case in all_cases(full=False)} == nodes
    whole = all_cases(full=True)
    for dtype in ("float32", "float16", "bfloat16"):
        assert {case.op_type for case in whole if case.call.dtype == dtype} == nodes
    assert len(whole) > len(all_cases(full=False))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", cases("float32"))
def test_a_right_kernel_passes(name: str, dtype: Dtype) -> None:
    found = checked(cases(dtype)[name])
    assert found.faults == ()
    assert found.excess <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_sizes_pass_too(dtype: Dtype) -> None:
    odd = {case.use: case for case in odd_cases(dtype)}
    for use in ("[1,300] x 67, R 1, P 3", "[1,1] of 1 x [65,31], R 1, P 5"):
        assert checked(odd[use]).faults == ()


# ---- planted mistakes


def wrong_column(outputs: list[Array]) -> list[Array]:
    outputs[0][..., -1] *= ELEMENTS["float32"].type(1.02)
    return outputs


def one_unwritten(outputs: list[Array]) -> list[Array]:
    outputs[-1].reshape(-1)[-1] = np.nan
    return outputs


@pytest.mark.parametrize("name", cases("float32"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_column_fails(name: str, dtype: Dtype) -> None:
    found = checked(cases(dtype)[name], FakeGpu(change=wrong_column))
    assert found.excess > 1
    assert any("times its bound" in fault for fault in found.faults)


@pytest.mark.parametrize("name", cases("float32"))
def test_an_element_that_is_not_written_fails(name: str) -> None:
    found = checked(cases("float32")[name], FakeGpu(change=one_unwritten))
    assert any(fault.startswith("1 of ") and "not written" in fault for fault in found.faults)


def swapped_groups(inputs: dict[str, Array]) -> dict[str, Array]:
    name = next(name for name in inputs if name.endswith("scales"))
    return {**inputs, name: np.ascontiguousarray(inputs[name][..., ::-1, :])}


@pytest.mark.parametrize("name", ["product", "matrix", "gate-up", "down"])
def test_scales_of_another_group_fail(name: str) -> None:
    found = checked(cases("bfloat16")[name], FakeGpu(misread=swapped_groups))
    assert found.faults


@pytest.mark.parametrize("name", ["gate-up", "down"])
def test_another_expert_fails(name: str) -> None:
    def other(inputs: dict[str, Array]) -> dict[str, Array]:
        return {**inputs, "experts": 1 - inputs["experts"]}

    assert checked(cases("bfloat16")[name], FakeGpu(misread=other)).faults


def test_a_slot_too_few_fails() -> None:
    def shorter(inputs: dict[str, Array]) -> dict[str, Array]:
        return {**inputs, "start": np.maximum(inputs["start"] - 1, 0)}

    assert checked(cases("bfloat16")["split"], FakeGpu(misread=shorter)).faults


def test_a_write_beside_an_output_fails() -> None:
    case, gpu = cases("float32")["product"], FakeGpu()

    def beside(outputs: list[Array]) -> list[Array]:
        first = gpu.launches[-1][-1] - GUARD
        gpu.at(first, 1)[:] = 0
        return outputs

    gpu.change = beside
    assert checked(case, gpu).faults == ("something is written outside an output",)


def test_two_runs_that_differ_fail() -> None:
    numbers = iter(range(1000))

    def drifting(outputs: list[Array]) -> list[Array]:
        outputs[0].reshape(-1)[0] += 1e-9 * next(numbers)
        return outputs

    gpu = FakeGpu(change=drifting)
    assert "two runs differ" in checked(cases("float32")["combine"], gpu).faults


def test_of_a_large_result_other_columns_are_looked_at_in_each_round() -> None:
    seen: list[int] = []
    wide = product("wide", "float32", 1, Matrix(rows=4, columns=300), 1)

    def wrong_from_the_second_launch(outputs: list[Array]) -> list[Array]:
        seen.append(len(seen))
        outputs[0][..., 150:200] += 1
        return outputs

    gpu = FakeGpu(change=wrong_from_the_second_launch)
    found = checked(wide, gpu, columns=20, rounds=2)
    assert any("of 22 elements" in fault or "of 21 elements" in fault for fault in found.faults)


def test_first_and_last_column_are_always_looked_at() -> None:
    wide = product("wide", "float32", 1, Matrix(rows=4, columns=300), 1)
    for place in (0, -1):

        def wrong(outputs: list[Array], place: int = place) -> list[Array]:
            outputs[0][..., place] += 1
            return outputs

        assert checked(wide, FakeGpu(change=wrong), columns=1).faults


def test_inputs_are_fresh_in_each_round() -> None:
    drawn: list[bytes] = []

    def kept(inputs: dict[str, Array]) -> dict[str, Array]:
        drawn.append(inputs["weight"].tobytes())
        return inputs

    checked(cases("float32")["product"], FakeGpu(misread=kept), rounds=3)
    assert len(drawn) == 6  # each twice
    assert len(set(drawn)) == 3


def test_a_case_beyond_the_memory_is_left_out() -> None:
    found = checked(cases("float32")["product"], FakeGpu(free=1 << 20))
    assert "device memory" in found.skipped
    assert outcome([found], 1, OPTIONS).status == "fail", "nothing was checked"


def test_the_outcome_names_what_is_wrong() -> None:
    by_name = cases("float32")
    right = checked(by_name["matrix"])
    wrong = checked(by_name["product"], FakeGpu(change=wrong_column))
    made = outcome([right, wrong], 2, OPTIONS)
    assert made.status == "fail"
    assert by_name["product"].name in made.text
    assert by_name["matrix"].name not in made.text
    assert outcome([right], 1, OPTIONS).status == "pass"
    assert len(made.figures["cases"]) == 2
    assert made.table.count("\n") == 3


def test_behind_a_fault_of_the_gpu_nothing_more_is_tried() -> None:
    def crash(_outputs: list[Array]) -> list[Array]:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    some = [case for name, case in cases("float32").items() if name in ("matrix", "product")]
    refused = BuildError("kernel x does not compile")
    found = check_cases(FakeGpu(change=crash), some, [uncompiled(case) for case in some], OPTIONS)
    assert [one.faults for one in found] == [("RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS",)]
    assert "1 were not reached" in outcome(found, 2, OPTIONS).text
    # one that does not compile is no reason to stop
    found = check_cases(FakeGpu(), some, [refused, uncompiled(some[1])], OPTIONS)
    assert [one.faults for one in found] == [("kernel x does not compile",), ()]
    assert outcome(found, 2, OPTIONS).status == "fail"


def test_arguments_that_the_kernel_does_not_take_are_refused() -> None:
    compiled = uncompiled(cases("float32")["product"])
    addresses = {"x": 1, "weight": 2, "scales": 3}
    assert arguments(compiled, addresses, [9])[:3] == (1, 2, 3)
    with pytest.raises(AssertionError, match="arguments are passed"):
        arguments(compiled, addresses, [9, 10])
    other = dataclasses.replace(compiled.kernel, scalars=("rows", "tokens"))
    with pytest.raises(AssertionError, match="are taken"):
        arguments(dataclasses.replace(compiled, kernel=other), addresses, [9])
