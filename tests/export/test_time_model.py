"""The time model counts what the shapes add up to, and adds times that can be told by hand."""

import dataclasses
import itertools
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.scaling import fullest_rank
from export_grok.config import GROK_1, TENSOR_PARALLEL_SIZES, Dtype, GrokConfig, HeadDtype
from export_grok.engines.trt.memory import memory_of
from export_grok.engines.trt.record import Sizes
from export_grok.errors import ConfigError
from export_grok.export.contract import GRAPH_KINDS, GraphKind
from export_grok.export.data_sheets import DATA_SHEETS
from export_grok.export.time_model import (
    Workload,
    estimate,
    expected_experts,
    rank_step,
    sums_of_step,
)
from export_grok.runtime.bench.traffic import step_traffic
from tests.bundles import traced
from tests.conftest import DATA, FIXTURES

ROOT = Path(__file__).resolve().parent.parent.parent
H100 = DATA_SHEETS["h100"]


def config_of(name: str) -> GrokConfig:
    return GrokConfig.from_file(DATA / name / "config.json")


@pytest.mark.parametrize("head", ["float32", "int8"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", [*FIXTURES, "grok-1"])
def test_one_rank_alone_reads_what_bench_counts_for_the_cpu_engine(
    name: str, batch: int, head: HeadDtype
) -> None:
    config = GROK_1 if name == "grok-1" else config_of(name)
    step = rank_step(config.for_rank(1), "float32", head, Workload(batch=batch, context=300))
    traffic = step_traffic(config, "float32", head, batch=batch, attended=300)
    for part in ("dense", "experts", "head", "embedding", "cache"):
        assert getattr(step, part) == pytest.approx(getattr(traffic, part), rel=1e-12), part
    assert step.read == pytest.approx(traffic.total)
    assert step.sums == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["float32", "int8"])
def test_a_rank_holds_what_the_engine_for_gpus_puts_there(head: HeadDtype, dtype: Dtype) -> None:
    sizes = Sizes(batch=3, chunk=1, max_length=500)  # of a chunk of 1 no slot is added
    for ranks in TENSOR_PARALLEL_SIZES:
        rank = GROK_1.for_rank(ranks)
        step = rank_step(rank, dtype, head, Workload(batch=3, context=sizes.slots))
        sized = dataclasses.replace(sizes, tensor_parallel=ranks)
        memory = memory_of(rank, sized, dtype, head)
        assert (step.held, step.cache_held) == (memory.weights, memory.cache)


def test_ranks_share_all_but_router_and_norms() -> None:
    whole = rank_step(GROK_1.for_rank(1), "bfloat16", "float32", Workload(batch=4))
    for ranks in (2, 4, 8):
        part = rank_step(GROK_1.for_rank(ranks), "bfloat16", "float32", Workload(batch=4))
        on_all = 64 * 4 * (6144 * 8 + 4 * 6144)
        assert part.dense - on_all == (whole.dense - on_all) / ranks
        assert part.experts == whole.experts / ranks
        assert part.head - 4 * 6144 == (whole.head - 4 * 6144) / ranks
        assert part.cache == whole.cache / ranks
        assert part.held < whole.held / ranks * 1.01


def test_expected_experts_are_the_average_over_all_choices() -> None:
    config = dataclasses.replace(config_of("tiny"), num_experts=5, num_selected_experts=2)
    pairs = list(itertools.combinations(range(5), 2))
    for batch in (1, 2, 3):
        counts = [len(set().union(*rows)) for rows in itertools.product(pairs, repeat=batch)]
        assert expected_experts(config, batch) == pytest.approx(sum(counts) / len(counts))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_fullest_rank_of_whole_experts_is_the_average_over_all_choices(
    batch: int, ranks: int
) -> None:
    config = dataclasses.replace(config_of("tiny"), num_experts=4, num_selected_experts=2)
    mine = 4 // ranks
    fullest = []
    for rows in itertools.product(itertools.combinations(range(4), 2), repeat=batch):
        chosen = set().union(*rows)
        fullest.append(max(len(chosen & {*range(r * mine, (r + 1) * mine)}) for r in range(ranks)))
    assert fullest_rank(config, batch, ranks) == Fraction(sum(fullest), len(fullest))


@pytest.mark.parametrize("kind", GRAPH_KINDS)
def test_the_sums_are_those_of_the_graphs(kind: GraphKind) -> None:
    config = config_of("tiny8")
    template = traced(kind, config, "bfloat16", "float32", 2)
    nodes = [node for node in template.graph.all_nodes() if node.op_type == "GrokAllReduce"]
    assert len(nodes) == {"embedding": 1, "layer": 2}.get(kind, 0)
    for node in nodes:
        (summed,) = node.outputs
        assert summed.shape is not None
        assert str(summed.dtype) == "BFLOAT16"
        assert summed.shape[-1] == config.emb_size
    if kind == "layer":
        assert sums_of_step(config.for_rank(2)) == config.num_layers * len(nodes) + 1


def test_a_sum_is_of_a_vector_for_each_row() -> None:
    step = rank_step(GROK_1.for_rank(8), "bfloat16", "float32", Workload(batch=3))
    assert (step.sums, step.sum_bytes) == (129, 3 * 6144 * 2)


def test_times_are_bytes_by_bandwidth_and_sums_by_latency_and_link() -> None:
    work = Workload(batch=2, context=100)
    found = estimate(
        GROK_1.for_rank(8), "bfloat16", "int8", work, H100, bandwidth_share=0.5, latency=10e-6
    )
    assert found.read_seconds == pytest.approx(found.step.read / 1675e9)
    each = 10e-6 + 2 * 6144 * 2 * (2 * 7 / 8) / 450e9
    assert found.sum_seconds == pytest.approx(129 * each)
    assert found.seconds == pytest.approx(found.read_seconds + found.sum_seconds)
    assert found.row_tokens_per_second == pytest.approx(1 / found.seconds)
    assert found.tokens_per_second == pytest.approx(2 / found.seconds)


def test_grok_1_in_bfloat16_fits_into_8_h100_and_not_into_2() -> None:
    fits = {
        ranks: estimate(GROK_1.for_rank(ranks), "bfloat16", "float32", Workload(), H100).fits
        for ranks in (2, 8)
    }
    assert fits == {2: False, 8: True}


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"context": -1}])
def test_a_workload_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        Workload(**wrong)


def test_16_ranks_are_refused_with_the_sizes_that_are_allowed() -> None:
    with pytest.raises(ConfigError, match=r"8 key/value heads.* by 16 ranks; use 1, 2, 4, 8"):
        GROK_1.for_rank(16)


@pytest.mark.parametrize("name", ["tensor_parallel", "scaling"])
def test_the_tables_of_the_documentation_are_those_the_command_prints(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), name]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    written = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in rows if line not in written] == []
