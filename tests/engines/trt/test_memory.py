"""What a rank of the released model needs, by hand; and who is told that it does not fit."""

import dataclasses

import pytest

from export_grok.config import GROK_1
from export_grok.engines.trt.memory import MOST_GB, Memory, check_memory, memory_of
from export_grok.engines.trt.record import Sizes
from export_grok.errors import ConfigError

SIZES = Sizes(tensor_parallel=8)
RANK = GROK_1.for_rank(8)

# One of 8 ranks has 6 query heads and one key/value head of 128, and 4096 columns of each expert.
ATTENTION = 6144 * (6 * 128) + 2 * 6144 * 128 + (6 * 128) * 6144
ATTENTION_SCALES = 2 * (6 * 128 + 2 * 128 + 6144)
EXPERTS = 8 * 3 * 6144 * 4096
EXPERT_SCALES = 2 * 8 * (2 * 4096 + 6144)
ROUTER_AND_NORMS = 4 * (8 * 6144 + 4 * 6144)
LAYER = ATTENTION + ATTENTION_SCALES + EXPERTS + EXPERT_SCALES + ROUTER_AND_NORMS
TABLE_OF_BFLOAT16, NORM = 2 * 16384 * 6144, 4 * 6144


def test_the_weights_of_one_of_8_ranks_are_what_it_holds() -> None:
    assert LAYER == 615_528_448
    memory = memory_of(RANK, SIZES, "bfloat16", "float32")
    assert memory.weights == 64 * LAYER + TABLE_OF_BFLOAT16 + NORM == 39_595_171_840


def test_a_head_of_int8_is_there_besides_the_table() -> None:
    codes, scales = 6144 * 16384, 4 * 16384
    without, with_it = (
        memory_of(RANK, SIZES, "bfloat16", head).weights for head in ("float32", "int8")
    )
    assert with_it - without == codes + scales


def test_a_table_of_float32_takes_twice_the_bytes_and_nothing_else_does() -> None:
    narrow, wide = (memory_of(RANK, SIZES, dtype, "float32") for dtype in ("float16", "float32"))
    assert wide.weights - narrow.weights == TABLE_OF_BFLOAT16
    assert wide.cache == 2 * narrow.cache


def test_the_whole_model_is_that_of_8_ranks_less_what_each_of_them_has_whole() -> None:
    alone = memory_of(GROK_1.for_rank(1), Sizes(), "bfloat16", "float32")
    ranks = memory_of(RANK, SIZES, "bfloat16", "float32")
    assert 8 * ranks.weights - alone.weights == 7 * (64 * ROUTER_AND_NORMS + NORM)
    assert 8 * ranks.cache == alone.cache


def test_the_cache_is_of_every_row_and_of_a_last_chunk_that_is_written_whole() -> None:
    sizes = dataclasses.replace(SIZES, batch=4, chunk=100, max_length=1000)
    memory = memory_of(RANK, sizes, "bfloat16", "float32")
    assert memory.cache == 64 * 2 * 4 * 1152 * 128 * 2  # 1099 slots, up to 9 * 128
    one = dataclasses.replace(sizes, batch=1)
    assert memory.cache == 4 * memory_of(RANK, one, "bfloat16", "float32").cache


@pytest.mark.parametrize(
    ("chunk", "length", "written"),
    [
        (256, 8192, 2 * 6 * 256 * 8448 * 4),  # attention logits
        (256, 2048, 6144 * 4096 * 4),  # an expert's last matrix
        (64, 2048, 2 * 6 * 64 * 2176 * 4),  # no matrix is written for few rows
    ],
)
def test_prefill_writes_attention_logits_or_an_experts_matrix(
    chunk: int, length: int, written: int
) -> None:
    sizes = dataclasses.replace(SIZES, chunk=chunk, max_length=length)
    assert memory_of(RANK, sizes, "bfloat16", "float32").prefill == written


def test_prefill_writes_the_matrix_of_an_int8_head() -> None:
    assert memory_of(RANK, SIZES, "bfloat16", "int8").prefill == 6144 * 16384 * 2


# ---- what fits

GB = 10**9
NEED = Memory(weights=60 * GB, cache=20 * GB, prefill=GB // 10)


def test_what_fits_to_the_byte_is_taken() -> None:
    exact = Memory(weights=79 * GB, cache=GB - 1, prefill=1)
    check_memory(RANK, SIZES, exact, (80,), None)
    check_memory(RANK, SIZES, NEED, (90,), None)
    check_memory(RANK, SIZES, NEED, (80,), 80.2)
    with pytest.raises(ConfigError):
        check_memory(RANK, SIZES, dataclasses.replace(exact, prefill=2), (80,), None)


def test_a_refusal_names_what_is_needed_what_there_is_and_what_to_do() -> None:
    sizes = dataclasses.replace(SIZES, batch=16, chunk=128, max_length=4096)
    with pytest.raises(ConfigError) as caught:
        check_memory(RANK, sizes, NEED, (80, 89, 90), None)
    text = str(caught.value)
    assert "one of 8 ranks needs 80.1 GB (60.0 weights, 20.0 cache of 16 rows of 4096" in text
    assert "0.1 for a chunk of 128" in text
    assert "the largest GPUs have less (SM80: 80 GB, SM89: 48 GB)" in text
    assert "SM90" not in text
    for option in ("--tp", "--batch", "--max-length", "--chunk", "--sm", "--gpu-memory"):
        assert option in text


def test_a_refusal_by_the_memory_given_says_so() -> None:
    with pytest.raises(ConfigError, match=r"--gpu-memory says less \(SM90: 79.5 GB\)"):
        check_memory(RANK, SIZES, NEED, (90,), 79.5)


def test_the_released_model_does_not_fit_one_gpu_of_any_kind() -> None:
    alone = GROK_1.for_rank(1)
    need = memory_of(alone, Sizes(), "bfloat16", "float32")
    for sm in MOST_GB:
        with pytest.raises(ConfigError, match=r"one GPU needs 3\d\d\.\d GB"):
            check_memory(alone, Sizes(), need, (sm,), None)


def test_8_ranks_of_the_released_model_fit_gpus_of_80_gb() -> None:
    need = memory_of(RANK, SIZES, "bfloat16", "float32")
    check_memory(RANK, SIZES, need, (80, 90, 100, 120), None)
    with pytest.raises(ConfigError):
        check_memory(RANK, SIZES, need, (80,), 39)


def test_an_architecture_that_is_not_known_has_as_much_as_the_largest() -> None:
    check_memory(RANK, SIZES, Memory(weights=192 * GB, cache=0, prefill=0), (103,), None)
    with pytest.raises(ConfigError, match="SM103: 192 GB"):
        check_memory(RANK, SIZES, Memory(weights=193 * GB, cache=0, prefill=0), (103,), None)
