"""Bytes of a step are those of the stored weights that it reads, counted by hand."""

import itertools

import pytest

from export_grok.config import GrokConfig
from export_grok.export.time_model import expected_experts
from export_grok.runtime.bench.traffic import step_traffic
from tests.conftest import Golden


def test_a_step_of_the_tiny_model_counted_by_hand(tiny_config: GrokConfig) -> None:
    traffic = step_traffic(tiny_config, "float32", "float32", batch=1, attended=10)
    # 2 layers, width 96, 6 query and 2 key/value heads of 16, experts of 256, one scale a column.
    attention = 96 * 96 + 2 * (96 * 32) + 96 * 96
    attention_scales = 2 * (96 + 32 + 32 + 96)
    router_and_norms = 4 * (96 * 8 + 4 * 96)
    assert traffic.dense == 2 * (attention + attention_scales + router_and_norms)
    expert = 3 * 96 * 256 + 2 * (256 + 256 + 96)
    assert traffic.experts == 2 * 2 * expert
    assert traffic.head == 4 * (512 * 96 + 96)
    assert traffic.embedding == 4 * 96
    assert traffic.cache == 2 * 2 * 10 * 2 * 16 * 4
    assert traffic.total == pytest.approx(
        traffic.dense + traffic.experts + traffic.head + traffic.embedding + traffic.cache
    )


def test_a_batch_reads_more_experts_rows_and_cache_and_the_rest_once(
    tiny_config: GrokConfig,
) -> None:
    one = step_traffic(tiny_config, "float32", "float32", batch=1, attended=10)
    four = step_traffic(tiny_config, "float32", "float32", batch=4, attended=10)
    assert (four.dense, four.head) == (one.dense, one.head)
    assert (four.embedding, four.cache) == (4 * one.embedding, 4 * one.cache)
    assert four.experts / one.experts == pytest.approx(8 * (1 - 0.75**4) / 2)


def test_an_int8_head_is_counted_as_it_is(tiny_config: GrokConfig) -> None:
    wide = step_traffic(tiny_config, "float32", "float32", batch=1, attended=10)
    narrow = step_traffic(tiny_config, "float32", "int8", batch=1, attended=10)
    assert narrow.head == 96 * 512 + 4 * 512 + 4 * 96
    assert wide.total - narrow.total == wide.head - narrow.head
    assert narrow.embedding == wide.embedding


def test_the_cache_has_the_dtype_of_the_bundle(tiny_config: GrokConfig) -> None:
    wide, half = (
        step_traffic(tiny_config, dtype, "float32", batch=2, attended=7).cache
        for dtype in ("float32", "bfloat16")
    )
    assert wide == 2 * half


def test_a_batch_that_chooses_all_experts_reads_all_stored_weights(golden: Golden) -> None:
    traffic = step_traffic(golden.config, "float32", "float32", batch=1000, attended=0)
    stored = sum(weight.nbytes for weight in golden.index)
    assert traffic.dense + traffic.experts + traffic.head == pytest.approx(stored, rel=1e-9)


@pytest.mark.parametrize(("experts", "chosen", "batch"), [(4, 2, 2), (5, 2, 3), (3, 1, 4)])
def test_expected_experts_are_the_average_over_all_choices(
    experts: int, chosen: int, batch: int, tiny_config: GrokConfig
) -> None:
    values = tiny_config.to_dict() | {"num_experts": experts, "num_selected_experts": chosen}
    config = GrokConfig.from_dict(values)
    choices = list(itertools.combinations(range(experts), chosen))
    counts = [len(set().union(*picked)) for picked in itertools.product(choices, repeat=batch)]
    assert expected_experts(config, batch) == pytest.approx(sum(counts) / len(counts))
    assert expected_experts(config, 1) == pytest.approx(chosen)
