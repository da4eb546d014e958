"""The choice of the head by the commands: what it makes, what is told of it, what is refused."""

import json
from pathlib import Path

import pytest

from export_grok.artifacts import open_bundle
from tests.commands.conftest import DEMO, Refused, Run

TABLE_BYTES = 4 * DEMO.vocab_size * DEMO.emb_size
INT8_BYTES = DEMO.vocab_size * DEMO.emb_size + 4 * DEMO.vocab_size


@pytest.mark.parametrize("command", ["export", "build-engine"])
def test_an_unknown_head_is_refused_with_those_there_are(
    command: str, refused: Refused, tiny: Path, out: Path
) -> None:
    text = refused(command, tiny, "--out", out, "--head", "int4")
    assert "'int4' is not one of 'float32', 'int8'" in text


def test_graphs_keep_their_head(refused: Refused, demo: Path) -> None:
    text = refused("build-engine", demo, "--head", "int8")
    assert text.startswith("--head cannot be chosen for graphs that are made")


@pytest.mark.usefixtures("traced_once")
def test_an_int8_head_is_made_told_and_kept(
    done: Run, refused: Refused, checkpoint: Path, demo: Path, tmp_path: Path
) -> None:
    graphs = tmp_path / "graphs"
    made = done("export", checkpoint, "--out", graphs, "--head", "int8")
    assert made.out == f"{graphs}: graphs of 3 layers in float32, head in int8\n"
    assert made.err == ""
    assert "replace it with --overwrite" in refused("export", checkpoint, "--out", graphs)
    built = done("build-engine", graphs)
    assert "GrokInt8Linear 14 lowered" in built.out  # 4 in each layer, and one in each head
    assert open_bundle(graphs).manifest.head == "int8"

    told = json.loads(done("inspect", graphs, "--json").out)
    plain = json.loads(done("inspect", demo, "--json").out)
    assert (told["head"], told["head_bytes"]) == ("int8", INT8_BYTES)
    assert (plain["head"], plain["head_bytes"]) == ("float32", TABLE_BYTES)
    assert plain["head_error"] is None
    error = told["head_error"]
    assert 0.002 < error["relative"] <= error["largest"] < 0.05
    table = done("inspect", graphs).out
    assert f"int8, {INT8_BYTES / 1000:,.2f} kB, relative error {error['relative']:.3%}" in table
    assert "float32, 786.43 kB" in done("inspect", demo).out

    for ours, of_the_table in zip(told["ranks"], plain["ranks"], strict=True):
        size = ours["tensor_parallel"]
        less = of_the_table["read_bytes_per_token"] - ours["read_bytes_per_token"]
        assert less == (TABLE_BYTES - INT8_BYTES) // size
        more = ours["weight_bytes"] - of_the_table["weight_bytes"]
        assert more == INT8_BYTES // size  # the embedding keeps its table
    assert told["bytes_by_dtype"] == plain["bytes_by_dtype"]
