"""What `inspect` says is what the shapes of the model add up to, computed here by hand."""

import dataclasses
import json
from pathlib import Path

import pytest

from export_grok.config import GROK_1, Dtype, GrokConfig
from export_grok.errors import BundleError, CheckpointError
from export_grok.export.checkpoint import released_files
from export_grok.export.data_sheets import DATA_SHEETS
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.export.released_layout import write_released
from export_grok.export.summary import CACHE_BYTES, RankNeeds, Summary, summary_of
from export_grok.export.table import print_summary
from export_grok.export.time_model import Workload, estimate, rank_step
from tests.conftest import DATA, FIXTURES

SIZES = {"tiny": (1, 2), "tiny8": (1, 2, 4, 8), "deep13": (1, 2, 4, 8)}


@pytest.fixture(scope="module")
def grok_1(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Return the summary of the whole model: 770 files of holes, which take no room."""
    folder = tmp_path_factory.mktemp("grok_1")
    (folder / "ckpt-0").mkdir()
    for file, parameters in released_files(GROK_1).items():
        write_released(folder / "ckpt-0" / file, parameters, None)
    return summary_of(folder)


def summary_in(name: str) -> tuple[GrokConfig, Summary]:
    return GrokConfig.from_file(DATA / name / "config.json"), summary_of(DATA / name)


def matrices(c: GrokConfig, size: int) -> tuple[int, int]:
    """Return the bytes of one layer's attention matrices, and of one expert, on one rank."""
    q, kv = c.num_q_heads * c.key_size // size, c.num_kv_heads * c.key_size // size
    ffn, groups = c.ffn_size // size, max(c.row_parallel_scale_groups // size, 1)
    # int8 values, then 2 bytes a scale: one a column, or one a column and group of rows.
    attention = 2 * c.emb_size * (q + kv) + 2 * (q + 2 * kv + groups * c.emb_size)
    expert = 3 * c.emb_size * ffn + 2 * (2 * ffn + groups * c.emb_size)
    return attention, expert


def weight_bytes(c: GrokConfig, size: int, experts: int) -> int:
    """Return the bytes of all layers and the head on one rank, of so many experts a layer."""
    attention, expert = matrices(c, size)
    floats = 4 * c.emb_size * (4 + c.num_experts)  # four norms and the router, on every rank
    head = 4 * c.emb_size * (c.vocab_size // size + 1)
    return c.num_layers * (attention + experts * expert + floats) + head


def test_grok_1_as_a_whole(grok_1: Summary) -> None:
    assert (grok_1.kind, grok_1.config, grok_1.files) == ("checkpoint", GROK_1, 770)
    int8 = 64 * (3 * 8 * 6144 * 32768 + 2 * 6144 * (6144 + 1024))
    float32 = 131072 * 6144 + 6144 + 64 * (6144 * 8 + 4 * 6144)
    assert grok_1.parameters == int8 + float32 == 315_684_820_992
    assert grok_1.bytes_by_dtype["int8"] == int8
    assert grok_1.bytes_by_dtype["float32"] == 4 * float32
    assert int8 + 4 * float32 == 318_114_914_304
    assert grok_1.bytes_by_dtype["bfloat16"] == 2 * grok_1.scales
    assert grok_1.scales == 64 * (6144 + 2 * 1024 + 8 * 6144 + 8 * (2 * 32768 + 8 * 6144))
    assert grok_1.file_bytes > sum(grok_1.bytes_by_dtype.values())


def test_grok_1_on_one_rank_of_8(grok_1: Summary) -> None:
    (needs,) = (rank for rank in grok_1.ranks if rank.tensor_parallel == 8)
    # A layer: 6 + 6 query rows of 128 in and out, 1 key and 1 value head, 4096 expert columns.
    attention = 6144 * (768 + 128 + 128 + 768) + 2 * (768 + 128 + 128 + 6144)
    expert = 3 * 6144 * 4096 + 2 * (4096 + 4096 + 6144)
    rest = 4 * (4 * 6144 + 6144 * 8)
    head = 4 * (16384 * 6144 + 6144)
    assert needs.weight_bytes == 64 * (attention + 8 * expert + rest) + head
    assert needs.read_bytes_per_token == 64 * (attention + 2 * expert + rest) + head
    assert needs.cache_bytes_per_token == 64 * 2 * 1 * 128 * 2
    assert needs.cache_bytes == 8192 * needs.cache_bytes_per_token


def test_the_cache_of_grok_1_takes_a_quarter_mebibyte_a_token(grok_1: Summary) -> None:
    assert grok_1.ranks[0].tensor_parallel == 1
    assert grok_1.ranks[0].cache_bytes_per_token == 64 * 2 * 8 * 128 * 2 == 262_144
    assert grok_1.ranks[0].cache_bytes == 2**31


def test_the_bound_of_grok_1_is_bandwidth_by_bytes_read(grok_1: Summary) -> None:
    needs = grok_1.ranks[0]
    assert needs.tokens_per_second(float(needs.read_bytes_per_token)) == 1
    assert needs.tokens_per_second(3.35e12) == 3.35e12 / needs.read_bytes_per_token
    # 82.9 billion int8 values take part in a token, and 0.8 billion of 4 bytes.
    assert needs.read_bytes_per_token == pytest.approx(82.95e9 + 4 * 0.81e9, rel=0.001)


@pytest.mark.parametrize("name", FIXTURES)
def test_all_ranks_of_a_fixture(name: str) -> None:
    config, summary = summary_in(name)
    assert [needs.tensor_parallel for needs in summary.ranks] == list(SIZES[name])
    for needs in summary.ranks:
        size = needs.tensor_parallel
        heads = config.num_kv_heads // size
        cache = config.num_layers * 2 * heads * config.key_size * 2
        assert needs == RankNeeds(
            tensor_parallel=size,
            weight_bytes=weight_bytes(config, size, config.num_experts),
            cache_bytes_per_token=cache,
            cache_bytes=cache * config.sequence_len,
            read_bytes_per_token=weight_bytes(config, size, config.num_selected_experts),
            all_reduces_per_token=0 if size == 1 else 2 * config.num_layers + 1,
            all_reduce_bytes_per_token=(
                0 if size == 1 else (2 * config.num_layers + 1) * config.emb_size * 2
            ),
        )


@pytest.mark.parametrize("name", FIXTURES)
def test_one_rank_holds_every_byte_of_the_files(name: str) -> None:
    _, summary = summary_in(name)
    assert summary.ranks[0].weight_bytes == sum(summary.bytes_by_dtype.values())
    files = list((DATA / name / "ckpt-0").iterdir())
    assert summary.files == len(files)
    assert summary.file_bytes == sum(path.stat().st_size for path in files)
    held = summary.bytes_by_dtype
    assert summary.parameters == held["int8"] + held["float32"] // 4
    assert summary.scales == held["bfloat16"] // 2


@pytest.mark.parametrize(("dtype", "length"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_a_cache_element_is_as_long_as_its_dtype(dtype: Dtype, length: int) -> None:
    assert CACHE_BYTES[dtype] == length


def test_json_holds_the_summary_and_the_bounds() -> None:
    config, summary = summary_in("tiny8")
    value = json.loads(json.dumps(summary.to_dict(bandwidth=2e12)))
    assert value["bandwidth"] == 2e12
    assert GrokConfig.from_dict(value["config"]) == config
    assert value["dtype"] is value["backend"] is None
    for rank, needs in zip(value["ranks"], summary.ranks, strict=True):
        assert rank.pop("tokens_per_second_bound") == 2e12 / needs.read_bytes_per_token
        assert RankNeeds(**rank) == needs


def test_a_size_that_does_not_divide_the_model_is_left_out(tmp_path: Path) -> None:
    config = dataclasses.replace(
        GrokConfig.from_file(DATA / "tiny8" / "config.json"), vocab_size=630, num_layers=1
    )
    write_random_checkpoint(config, tmp_path)
    assert [needs.tensor_parallel for needs in summary_of(tmp_path).ranks] == [1, 2]


def test_the_table_shows_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    config, summary = summary_in("tiny8")
    print_summary(summary, bandwidth=1e12)
    shown = capsys.readouterr().out
    assert f"{summary.parameters:,} and {summary.scales:,} scales" in shown
    assert f"width {config.emb_size:,}, {config.num_q_heads} query" in shown
    assert "cache in bfloat16, 1,000 GB/s of memory" in shown
    for needs in summary.ranks:
        assert f"{1e12 / needs.read_bytes_per_token:,.1f}" in shown
        assert f"{needs.cache_bytes_per_token:,} B" in shown


def test_the_ranks_of_grok_1_sum_129_times_a_token(grok_1: Summary) -> None:
    alone, *ranks = grok_1.ranks
    assert (alone.all_reduces_per_token, alone.all_reduce_bytes_per_token) == (0, 0)
    for needs in ranks:
        assert needs.all_reduces_per_token == 2 * 64 + 1
        assert needs.all_reduce_bytes_per_token == 129 * 6144 * 2


@pytest.mark.parametrize("name", FIXTURES)
def test_a_graphs_summary_counts_a_rank_as_the_time_model_does(name: str) -> None:
    config, summary = summary_in(name)
    for needs in summary.ranks:
        step = rank_step(
            config.for_rank(needs.tensor_parallel), "float32", "float32", Workload(context=1)
        )
        assert step.held == needs.weight_bytes
        assert step.dense + step.experts + step.head == needs.read_bytes_per_token
        assert step.cache == 2 * needs.cache_bytes_per_token  # which is in bfloat16
        assert step.sums == needs.all_reduces_per_token


def test_the_table_and_json_of_a_gpu_show_the_time_model(
    grok_1: Summary, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Workload(batch=8, context=2048)
    found = grok_1.estimates("h100", work, bandwidth_share=0.5, latency=20e-6)
    print_summary(grok_1, bandwidth=1e12, estimates=[found])
    shown = capsys.readouterr().out
    assert "H100 SXM, on paper: batch 8, 2,048 tokens a row; 50% of 3,350 GB/s, 20 us" in shown
    assert "One rank at each TP" not in shown
    value = json.loads(json.dumps(found.to_dict()))
    assert value["workload"] == {"batch": 8, "context": 2048}
    assert (value["bandwidth_share"], value["latency"]) == (0.5, 20e-6)
    assert [rank["tensor_parallel"] for rank in value["ranks"]] == [1, 2, 4, 8]
    for size, rank in zip(found.ranks, value["ranks"], strict=True):
        expected = estimate(
            GROK_1.for_rank(size),
            "bfloat16",
            "float32",
            work,
            DATA_SHEETS["h100"],
            bandwidth_share=0.5,
            latency=20e-6,
        )
        assert found.ranks[size] == expected
        assert rank["tokens_per_second"] == expected.tokens_per_second
        assert f"{expected.tokens_per_second:,.1f}" in shown


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        summary_of(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BundleError, match="is not a manifest of export-grok"):
        summary_of(tmp_path)
