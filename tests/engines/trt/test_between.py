"""Ranks summed between plans of parts give what one gives; ranks are threads with fake GPUs.

Here the parts of the lowered graphs run in ONNX Runtime, and a stub of NCCL sums in the memory of
the fake GPUs. It proves the cut, addresses and the order of calls, and nothing
of TensorRT or NCCL.
"""

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import EngineOptions, ExportOptions
from export_grok.engines import cut
from export_grok.engines.pipeline import engine_from_source
from export_grok.engines.trt import tensors
from export_grok.engines.trt.build import summary
from export_grok.engines.trt.chain import buffer_bytes
from export_grok.engines.trt.fit import check_fit, plan_files
from export_grok.engines.trt.graphs import StaticGraph, static_graphs
from export_grok.engines.trt.record import (
    PHASES,
    GraphRecord,
    PlanRecord,
    Sizes,
    TrtRecord,
    record_in,
)
from export_grok.engines.trt.tensors import size_of
from export_grok.errors import BundleError, ConfigError
from tests.conftest import DATA, load_golden
from tests.engines.trt.fake_device import Compute, FakeDevice
from tests.engines.trt.lowered import Arrays, run_by
from tests.engines.trt.test_trt_ranks import GROUPS, TOLERANCE, Ranks, at, ints

pytestmark = pytest.mark.usefixtures("traced_once")

PARTS = {"embedding": 1, "layer": 3, "head": 1, "head_all": 1}


@functools.cache
def static(name: str, count: int) -> tuple[StaticGraph, ...]:
    """Return the parts that a build makes of the graphs of a fixture."""
    golden = load_golden(name)
    manifest = SimpleNamespace(config=golden.config, dtype="float32", head="float32")
    graphs: Any = SimpleNamespace(manifest=manifest)
    sizes = Sizes(tensor_parallel=count, batch=2, chunk=7, max_length=64)
    return static_graphs(graphs, sizes, "between")


def record_of(name: str, count: int) -> TrtRecord:
    graphs = tuple(graph.record for graph in static(name, count))
    return TrtRecord(
        module="tensorrt",
        version="1.2.3",
        sizes=Sizes(tensor_parallel=count, batch=2, chunk=7, max_length=64),
        graphs=graphs,
        plans=tuple(
            PlanRecord(
                kind=row.kind,
                phase=row.phase,
                sm=90,
                file=row.file.replace(".onnx", ".sm90.plan"),
                part=row.part,
            )
            for row in graphs
        ),
        kernels={},
        recipe="",
        sums="between",
    )


@functools.cache
def runner(name: str, count: int, file: str) -> Callable[[Arrays], Arrays]:
    (graph,) = (row for row in static(name, count) if row.record.file == file)
    return run_by(graph.model, "float32")


MAKING = threading.Lock()


def in_parts(name: str, count: int) -> Callable[[GraphRecord], Compute]:
    """Return what computes the parts in ONNX Runtime."""

    def compute_of(graph: GraphRecord) -> Compute:
        with MAKING:
            run = runner(name, count, graph.file)
        outputs = [row.name for row in graph.bindings if row.direction == "out"]

        def compute(inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
            found = run(dict(inputs))
            return [found[name] for name in outputs]

        return compute

    return compute_of


def ranks_of(name: str, count: int, folder: Path) -> Ranks:
    record, compute = record_of(name, count), in_parts(name, count)
    return Ranks(name, folder / "bundle", count, record=record, compute=compute, max_length=64)


@pytest.mark.parametrize(("name", "count"), GROUPS)
def test_fake_ranks_summed_between_plans_give_the_logits_of_the_original(
    name: str, count: int, tmp_path: Path
) -> None:
    arrays = load_golden(name).arrays
    tokens = ints(arrays["tokens"])
    ranks = ranks_of(name, count, tmp_path)
    prefill = ranks.forward_all(tokens, at(2, 0))
    assert np.abs(prefill - arrays["f32/prefill_logits"]).max() < TOLERANCE
    for step, column in enumerate(ints(arrays["f32/decode_tokens"]).T):
        start = at(2, tokens.shape[1] + step)
        logits = ranks.forward(column[:, None].copy(), start, at(2, 0))
        assert logits is not None
        assert np.abs(logits - arrays["f32/decode_logits"][:, step]).max() < TOLERANCE


def test_fake_ranks_are_summed_behind_each_part_but_the_last_and_join_no_context(
    tmp_path: Path,
) -> None:
    ranks = ranks_of("tiny", 2, tmp_path)
    layers = ranks.config.num_layers
    starts = [(len(device.log), len(device.runs)) for device in ranks.devices]
    ranks.forward(ints([[3], [4]]), at(2, 0), at(2, 0))
    assert ranks.hub.calls == [["NCCL's unique id", "init"]] * 2
    wanted = ["enqueue", "all_reduce"]  # the embedding
    wanted += ["enqueue", "all_reduce", "enqueue", "all_reduce", "enqueue"] * layers
    for device, (log, runs) in zip(ranks.devices, starts, strict=True):
        work = [word for word in device.log[log:] if word in ("enqueue", "all_reduce", "launch")]
        assert work == [*wanted, "enqueue"]
        parts = [(run.kind, run.part) for run in device.runs[runs:]]
        layer = [("layer", 0), ("layer", 1), ("layer", 2)]
        assert parts == [("embedding", 0), *layer * layers, ("head", 0)]


def test_a_fake_sum_lies_where_the_summand_was_and_no_part_writes_where_it_reads(
    tmp_path: Path,
) -> None:
    ranks = ranks_of("tiny", 2, tmp_path)
    ranks.forward(ints([[3], [4]]), at(2, 0), at(2, 0))
    (embedding, *layers, _) = (run.addresses for run in ranks.devices[0].runs)
    assert embedding["partial"] == layers[0]["h"]
    for first, second, third in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
        assert first["partial"] == second["sum"] != second["partial"] == third["sum"]
        assert first["h"] == second["h"] != third["h_out"]
        crossing = set(second) & set(third) - {"sum"}
        assert len(crossing) == 1
        assert all(second[name] == third[name] for name in crossing)


def test_all_parts_of_all_ranks_are_held_to_memory_before_anything_is_loaded() -> None:
    record = record_of("tiny", 2)
    plans = plan_files(record, Path(), 90)
    parts = {kind: [graph for graph, _ in plans[kind, "decode"]] for kind in PARTS}
    assert {kind: len(graphs) for kind, graphs in parts.items()} == PARTS
    hidden = size_of(next(row for row in parts["layer"][0].bindings if row.name == "h"))
    start = tokens = last = 2 * 8
    logits = 2 * load_golden("tiny").config.vocab_size // 2 * 4
    found = buffer_bytes(parts["embedding"], parts["layer"], parts["head"])
    # h twice, two sums, and one value that goes from the second part to the third
    assert found == 5 * hidden + start + tokens + last + 8 + logits


def test_a_part_without_a_plan_is_named() -> None:
    record = record_of("tiny", 2)
    plans = tuple(row for row in record.plans if (row.phase, row.part) != ("decode", 1))
    with pytest.raises(BundleError, match=r"no plan for SM90 of layer \(decode\), part 1:"):
        plan_files(dataclasses.replace(record, plans=plans), Path(), 90)


@pytest.mark.parametrize(("ranks", "told"), [(2, True), (1, False)])
def test_the_command_that_builds_anew_keeps_the_option_where_there_are_ranks(
    ranks: int, told: bool
) -> None:
    with pytest.raises(ConfigError, match="build them again") as error:
        check_fit(
            record_of("tiny", 2),
            Path("bundle"),
            ranks=ranks,
            batch=2,
            max_length=64,
            version="9",
            device=FakeDevice(),
        )
    assert str(error.value).endswith("--sums between") == told


def test_a_record_of_before_there_were_parts_loads() -> None:
    record = record_of("tiny", 2)
    value = json.loads(json.dumps(record.to_dict()))
    assert TrtRecord.from_dict(value) == record
    del value["sums"]
    for row in (*value["graphs"], *value["plans"]):
        del row["part"]
    old = TrtRecord.from_dict(value)
    assert old.sums == "plan"
    assert {row.part for row in old.graphs} == {row.part for row in old.plans} == {0}


def test_a_session_calls_summands_and_sums_as_the_cut_does() -> None:
    assert (tensors.PARTIAL, tensors.SUM) == (cut.PARTIAL, cut.SUM)


def test_one_rank_has_no_sums_to_take_between() -> None:
    with pytest.raises(ConfigError, match="one rank has no sums: say --tp 2"):
        EngineOptions(sums="between")


def test_an_engine_without_plans_refuses_the_option(tmp_path: Path) -> None:
    options = EngineOptions(sums="between", tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"--sums: the ort engine"):
        engine_from_source(DATA / "tiny", tmp_path / "out", backend="ort", engine=options)


def test_plans_of_all_parts_build(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds plans by tensorrt_rtx")
    options = EngineOptions(
        sums="between", tensor_parallel=2, sm=(89,), batch=2, chunk=8, max_length=96
    )

    def build() -> Any:
        return engine_from_source(
            DATA / "tiny",
            tmp_path / "engine",
            backend="trt-rtx",
            engine=options,
            options=ExportOptions(),
        )

    bundle = build()
    record = record_in(bundle.manifest)
    assert record.sums == "between"
    found = {(plan.kind, plan.phase, plan.part) for plan in record.plans}
    assert found == {
        (kind, phase, part)
        for kind, parts in PARTS.items()
        for phase in PHASES
        for part in range(parts)
    }
    assert "trt/layer.decode.2.onnx" in record.files
    assert "trt/head.decode.onnx" in record.files
    assert all((bundle.folder / file).stat().st_size for file in record.files)
    assert "2 ranks summed between plans" in summary(bundle.manifest)
    assert build().manifest == bundle.manifest
