"""Plans that do not suit are refused before one is loaded, with what would suit."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from export_grok.engines.trt.fit import flavour_of_record
from export_grok.engines.trt.record import Binding, Sizes, TrtRecord
from export_grok.engines.trt.session import TrtSession
from export_grok.errors import BundleError, ConfigError, ExportGrokError
from tests.conftest import load_golden
from tests.engines.trt.fake_device import FakeDevice, FakeRuntime, torch_model
from tests.engines.trt.records import bundle_with, record_for

NAME = "tiny"
SIZES = Sizes(batch=2, chunk=7, max_length=48)


def opened(
    folder: Path,
    record: TrtRecord,
    device: FakeDevice,
    *,
    batch: int = 2,
    max_length: int = 48,
    **runtime: Any,
) -> TrtSession:
    config = load_golden(NAME).config
    return TrtSession(
        bundle_with(record, NAME, folder),
        record,
        batch=batch,
        max_length=max_length,
        device=device,
        runtime=FakeRuntime(
            device=device, record=record, compute=torch_model(config, "float32"), **runtime
        ),
    )


def refused(
    kind: type[ExportGrokError], folder: Path, record: TrtRecord, device: FakeDevice, **asked: Any
) -> str:
    with pytest.raises(kind) as error:
        opened(folder, record, device, **asked)
    return str(error.value)


def record_of(sizes: Sizes = SIZES, **changes: Any) -> TrtRecord:
    return dataclasses.replace(record_for(load_golden(NAME).config, sizes), **changes)


@pytest.mark.parametrize(
    ("sizes", "sm", "asked", "wanted", "command"),
    [
        ({}, 90, {"batch": 3}, "for a batch of 2; 3 rows are asked for", "--batch 3"),
        (
            {},
            90,
            {"max_length": 60},
            "for rows of up to 48 tokens; 60 are asked for",
            "--chunk 7 --max-length 60",
        ),
        ({}, 90, {"version": "1.3.0"}, "of tensorrt 1.2.3; installed is 1.3.0", "--backend trt "),
        ({}, 89, {}, "for SM90; FakeGPU is SM89", "--sm 89"),
        ({"tensor_parallel": 2}, 90, {}, "needs 2 ranks, sees 1", "--tp 1"),
    ],
)
def test_what_does_not_suit_is_told_with_both_values_and_the_command_that_puts_it_right(
    tmp_path: Path, sizes: dict[str, int], sm: int, asked: Any, wanted: str, command: str
) -> None:
    device = FakeDevice(sm=sm)
    record = record_of(dataclasses.replace(SIZES, **sizes))
    said = refused(ConfigError, tmp_path, record, device, **asked)
    assert wanted in said
    assert f"export-grok build-engine {tmp_path} --backend trt" in said
    assert command in said
    assert device.log == []


def test_all_that_does_not_suit_is_told_at_once(tmp_path: Path) -> None:
    device = FakeDevice(sm=120)
    said = refused(ConfigError, tmp_path, record_of(), device, batch=1, max_length=64, version="9")
    assert [line.strip() for line in said.splitlines()[1:]] == [
        "for a batch of 2; 1 rows are asked for",
        "for rows of up to 48 tokens; 64 are asked for",
        "of tensorrt 1.2.3; installed is 9",
        "for SM90; FakeGPU is SM120",
        f"build them again: export-grok build-engine {tmp_path} --backend trt --sm 120 --tp 1 "
        "--batch 1 --chunk 7 --max-length 64",
    ]
    assert device.log == []


def test_a_shorter_row_suits(tmp_path: Path) -> None:
    opened(tmp_path, record_of(), FakeDevice(), max_length=10)


def test_memory_that_does_not_suffice_is_told_in_figures_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    device = FakeDevice(free=10**6, total=2 * 10**6)
    said = refused(ConfigError, tmp_path, record_of(), device)
    stored = sum(weight.nbytes for weight in load_golden(NAME).index)
    assert f"weights {stored / 1e9:.3g}, caches " in said
    assert (
        f"caches {2 * 2 * 2 * SIZES.slots * 128 / 1e9:.3g}, activations " in said
    )  # layers, k and v, rows
    assert "of FakeGPU's 0.002 GB 0.001 are free" in said
    assert "--batch" in said
    assert "--max-length" in said
    assert device.log == []


def test_memory_that_plans_work_in_is_counted_before_weights_are_read(tmp_path: Path) -> None:
    device = FakeDevice(free=10**7)
    said = refused(ConfigError, tmp_path, record_of(), device, scratch=10**8)
    assert "scratch 0.2" in said  # in a phase one plan runs after the other
    assert {*device.log} == {"deserialise"}
    assert device.buffers == {}


def test_memory_that_is_counted_is_all_that_is_allocated(tmp_path: Path) -> None:
    device = FakeDevice()
    opened(tmp_path, record_of(), device)
    opened(tmp_path, record_of(), FakeDevice(free=device.allocated))
    small = FakeDevice(free=device.allocated - 1)
    assert "device memory are needed" in refused(ConfigError, tmp_path, record_of(), small)
    assert small.buffers == {}


def test_a_graph_without_a_plan_is_named(tmp_path: Path) -> None:
    record = record_of()
    fewer = [plan for plan in record.plans if (plan.kind, plan.phase) != ("head", "prefill")]
    device = FakeDevice()
    said = refused(BundleError, tmp_path, dataclasses.replace(record, plans=tuple(fewer)), device)
    assert "no plan for SM90 of head (prefill)" in said
    assert device.log == []


def test_a_plan_that_is_not_of_its_graph_is_named_with_all_differences(tmp_path: Path) -> None:
    def change(row: Binding) -> Binding | None:
        if row.name == "start":
            return None
        if row.name == "h_out":
            return dataclasses.replace(row, dtype="float16")
        return dataclasses.replace(row, aliases=None) if row.name == "k_out" else row

    device = FakeDevice()
    said = refused(BundleError, tmp_path, record_of(), device, change=change)
    assert "layer.decode.sm90.plan is not the plan of trt/layer.decode.onnx" in said
    assert [line.strip() for line in said.splitlines()[1:]] == [
        "h_out is output float16 [2, 1, 96], must be output float32 [2, 1, 96]",
        f"k_out is output float32 [2, 2, {SIZES.slots}, 16], "
        f"must be output float32 [2, 2, {SIZES.slots}, 16] at the address of k_cache",
        "start is missing",
    ]
    assert "allocate" not in device.log


def test_plans_of_a_package_that_nobody_knows_are_refused() -> None:
    assert flavour_of_record(record_of()).backend == "trt"
    assert flavour_of_record(record_of(module="tensorrt_rtx")).backend == "trt-rtx"
    with pytest.raises(BundleError, match="'abacus'; tensorrt or tensorrt_rtx"):
        flavour_of_record(record_of(module="abacus"))
