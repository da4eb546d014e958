"""What graphs need of disk is what they will take: to the byte for weights, holes left out."""

import dataclasses
from pathlib import Path

import pytest

from export_grok.artifacts import COPIED_WEIGHTS, HEAD_WEIGHTS
from export_grok.config import ExportOptions, GrokConfig
from export_grok.export.checkpoint import open_weights
from export_grok.export.graph_folder import export_graphs
from export_grok.export.head import write_head
from export_grok.export.needs import graph_needs
from export_grok.export.plan import plan_of
from export_grok.needs import Needs
from tests.bundles import checkpoint_copy, traced_once

__all__ = ["traced_once"]


def needs_of(source: Path, out: Path, **options: object) -> Needs:
    config, index = open_weights(source)
    plan = plan_of(config, index, ExportOptions(**options))  # type: ignore[arg-type]
    return graph_needs(plan, index, out)


def disk(needs: Needs) -> int:
    return sum(part.nbytes for part in needs.disk)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint_copy("tiny", tmp_path / "tiny")


@pytest.mark.usefixtures("traced_once")
def test_copies_take_just_the_disk_that_is_told_and_are_not_made_twice(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told: list[Needs] = []
    options = ExportOptions(copy_weights=True)
    export_graphs(source, out, options, on_needs=told.append)
    graphs, weights = told[0].disk
    copies = list((out / COPIED_WEIGHTS).glob("*.safetensors"))
    assert weights.nbytes == sum(path.stat().st_size for path in copies)
    others = [path for path in out.rglob("*") if path.is_file() and path not in copies]
    assert sum(path.stat().st_size for path in others) < 2 * graphs.nbytes
    export_graphs(source, out, options, on_needs=told.append)
    assert told[1:] == [Needs()]


def test_an_int8_head_takes_just_the_disk_that_is_told(source: Path, tmp_path: Path) -> None:
    told = needs_of(source, tmp_path, head="int8")
    write_head(*open_weights(source), tmp_path)
    there = needs_of(source, tmp_path, head="int8")
    assert disk(told) - disk(there) == (tmp_path / HEAD_WEIGHTS).stat().st_size


def test_files_of_a_run_that_was_broken_off_need_no_room_again(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    before = needs_of(source, out, copy_weights=True)
    (out / COPIED_WEIGHTS).mkdir(parents=True)
    (out / COPIED_WEIGHTS / "layer_01.safetensors").write_bytes(bytes(1000))
    after = needs_of(source, out, copy_weights=True)
    assert disk(before) - disk(after) == 1000
    assert before.seconds > after.seconds


def test_weights_that_stay_where_they_are_need_no_disk(source: Path, tmp_path: Path) -> None:
    assert disk(needs_of(source, tmp_path / "out")) < 200_000


def test_holes_of_the_source_stay_holes_and_still_take_time(source: Path, tmp_path: Path) -> None:
    dense = needs_of(source, tmp_path / "out", copy_weights=True)
    config, index = open_weights(source)
    for file, length in index.files.items():
        with (source / file).open("wb") as made:
            made.truncate(length)
    plan = plan_of(config, index, ExportOptions(copy_weights=True))
    sparse = graph_needs(plan, index, tmp_path / "out")
    assert disk(sparse) < disk(dense) / 2
    assert sparse.seconds == dense.seconds


def test_nothing_is_written_where_the_needs_are_refused(source: Path, tmp_path: Path) -> None:
    class RefusedError(Exception):
        pass

    def refuse(needs: Needs) -> None:
        raise RefusedError

    for options in (ExportOptions(), ExportOptions(copy_weights=True, head="int8")):
        with pytest.raises(RefusedError):
            export_graphs(source, tmp_path / "out", options, on_needs=refuse)
        assert not (tmp_path / "out").exists()


def test_a_larger_model_takes_longer_and_an_int8_head_more_memory(
    source: Path, tmp_path: Path
) -> None:
    config, index = open_weights(source)
    plan = plan_of(config, index, ExportOptions(head="int8"))
    wide = dataclasses.replace(plan, config=wider(config))
    assert graph_needs(wide, index, tmp_path).memory > graph_needs(plan, index, tmp_path).memory
    deep = dataclasses.replace(plan, config=dataclasses.replace(config, num_layers=64))
    assert graph_needs(deep, index, tmp_path).seconds > graph_needs(plan, index, tmp_path).seconds


def wider(config: GrokConfig) -> GrokConfig:
    return dataclasses.replace(config, vocab_size=100 * config.vocab_size)
