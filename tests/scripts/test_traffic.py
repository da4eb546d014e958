"""The bytes of a kernel, counted once more by hand."""

import numpy as np
import pytest

from scripts.gpu.cases import (
    Case,
    Matrix,
    combine,
    decode_cases,
    dequantised,
    down,
    gate_up,
    matrices,
    product,
    split,
)
from scripts.gpu.inputs import Array, spread_inputs
from scripts.gpu.traffic import traffic
from tests.scripts.fake_gpu import uncompiled


def counted(case: Case, **values: Array) -> int:
    return traffic(uncompiled(case), values)


MATRIX = Matrix(rows=40, columns=32, groups=4)
EXPERTS = Matrix(rows=40, columns=32, groups=4, experts=8)
INT8, SCALES = 40 * 32, 2 * 4 * 32


def test_a_product_reads_its_matrix_and_writes_its_parts() -> None:
    case = product("", "bfloat16", 3, MATRIX, 5)
    assert counted(case) == 2 * 3 * 40 + INT8 + SCALES + 4 * 5 * 3 * 32


@pytest.mark.parametrize("matrix", [MATRIX, EXPERTS])
def test_a_matrix_is_of_one_expert(matrix: Matrix) -> None:
    assert counted(dequantised("", "float16", matrix)) == INT8 + SCALES + 2 * 40 * 32
    assert counted(dequantised("", "float32", matrix)) == INT8 + SCALES + 4 * 40 * 32


def test_an_expert_counts_once_whoever_chose_it() -> None:
    gates = gate_up("", "bfloat16", (2, 2), EXPERTS)
    downs = down("", "bfloat16", (2, 2), EXPERTS, 2)
    for chosen, read in (([[0, 1], [2, 7]], 4), ([[3, 3], [3, 3]], 1), ([[0, 1], [1, 0]], 2)):
        experts = np.array(chosen)
        beside = 2 * 2 * 40 + 8 * 4 + 4 * 4 * 32  # x, experts, hidden
        assert counted(gates, experts=experts) == 2 * read * (INT8 + SCALES) + beside
        beside = 4 * 4 * 40 + 2 * 4 + 8 * 4 + 4 * 2 * 4 * 32  # hidden, gates, experts, partial
        assert counted(downs, experts=experts) == read * (INT8 + SCALES) + beside


def test_of_caches_the_slots_count_that_a_row_sees() -> None:
    case = split("", "bfloat16", (2, 3, 50, 16), 4, 5, 0.3)
    beside = 2 * 2 * 3 * 4 * 16 + 8 * 2 + 4 * 2 * 3 * 5 * 4 * (16 + 2)
    for start, seen in (([0, 0], 2), ([9, 49], 60), ([49, 49], 100)):
        assert counted(case, start=np.array(start)) == 2 * 2 * seen * 3 * 16 + beside


def test_a_combination_reads_all_parts() -> None:
    case = combine("", "float16", (2, 3, 5, 4, 16))
    assert counted(case) == 4 * 2 * 3 * 5 * 4 * (16 + 2) + 2 * 2 * 3 * 4 * 16


def test_a_decode_step_of_a_layer_reads_what_the_released_sizes_say() -> None:
    """One token: 2 of 8 experts, and all attention matrices; MB by hand."""
    by_node: dict[str, int] = {}
    for case in decode_cases("bfloat16", 1, 1):
        if "head" not in case.use and case.op_type != "GrokAttentionSplit":
            values = {"experts": np.array([[0, 1]])}
            by_node[case.op_type] = by_node.get(case.op_type, 0) + counted(case, **values)
    # key and value are one case
    attention = 6144 * (6144 + 1024 + 6144)
    assert by_node["GrokInt8Product"] == pytest.approx(attention, rel=0.02)
    assert by_node["GrokMoeGateUp"] == pytest.approx(2 * 2 * 6144 * 32768, rel=0.001)
    assert by_node["GrokMoeDown"] == pytest.approx(2 * 6144 * 32768, rel=0.02)


def test_times_are_taken_with_as_many_experts_as_there_can_be_and_full_caches() -> None:
    random = np.random.default_rng(0)
    for n, distinct in ((1, 2), (3, 6), (5, 8)):
        found = spread_inputs(gate_up("", "float32", (n, 2), EXPERTS), random)
        assert len(np.unique(found["experts"])) == distinct
    found = spread_inputs(split("", "float32", (2, 3, 50, 16), 4, 5, 0.3), random)
    assert (found["start"] == 49).all()
    assert np.isfinite(found["k_cache"]).all()


def test_eight_ranks_have_an_eighth_of_every_matrix() -> None:
    whole, parts = matrices(1), matrices(8)
    for name, matrix in whole.items():
        assert parts[name].rows * parts[name].columns * 8 == matrix.rows * matrix.columns
