"""What is planted into the samples of a benchmark is called out, and nothing else is."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from export_grok.machine import Machine
from export_grok.plugins.kernels import Kernels
from export_grok.runtime.bench.ceiling import Reading
from export_grok.runtime.bench.doubts import doubts
from export_grok.runtime.bench.options import BenchOptions, Setting
from export_grok.runtime.bench.result import Bench, Engine, Measurement, Sample
from export_grok.runtime.bench.table import print_bench
from export_grok.runtime.bench.traffic import Traffic

GB = 10**9
STEADY = (0.99, 1.0, 1.01, 1.0, 1.0, 0.98, 1.02)


def measurement(
    stage: Any, tokens: int, seconds: tuple[float, ...] = STEADY, **sample: Any
) -> Measurement:
    """Return a setting whose steps read half of what the ceiling of 10 GB/s brings in a second."""
    traffic = Traffic(
        dense=2.0 * GB, experts=2.0 * GB, head=1.0 * GB, embedding=0, cache=0, experts_per_layer=2
    )
    values = {"cpu_seconds": 1.0, "pages_from_disk": 0, "ceiling": 10.0 * GB} | sample
    return Measurement(
        setting=Setting(stage=stage, batch=1, tokens=tokens),
        samples=tuple(Sample(seconds=(each,), **values) for each in seconds),
        traffic=traffic if stage == "decode" else None,
    )


SOUND = Bench(
    engine=Engine(
        folder=Path("bundle"),
        backend="ort",
        version="onnxruntime 1.32.0",
        kernels=Kernels(reason="a test"),
        weight_bytes=9 * GB,
        check_seconds=0.1,
        load_seconds={1: 2.0},
        private=None,
        mapped=None,
    ),
    machine=Machine(system="Linux", cpu="a processor", cores=2, memory=64 * GB),
    cache_bytes=32 << 20,
    options=BenchOptions(rounds=len(STEADY)),
    threads=2,
    method="four streams a thread",
    readings=tuple(
        Reading(bytes=round(10 * GB * rate), seconds=1.0, cpu_seconds=1.95) for rate in STEADY
    ),
    measurements=(
        measurement("prefill", 128),
        measurement("decode", 32),
        measurement("decode", 256),
    ),
)


def with_readings(**planted: Any) -> Bench:
    return dataclasses.replace(
        SOUND, readings=tuple(dataclasses.replace(each, **planted) for each in SOUND.readings)
    )


def with_measurement(**planted: Any) -> Bench:
    kept = SOUND.measurements[:2]
    return dataclasses.replace(SOUND, measurements=(*kept, measurement("decode", 256, **planted)))


def test_nothing_is_said_of_sound_samples() -> None:
    assert doubts(SOUND) == []


WIDE = (1.0, 1.0, 1.2, 1.2, 1.2, 1.4, 1.4)
NARROW = (1.0, 1.0, 1.0, 1.1, 1.1, 1.1, 9.0)


def test_a_wide_spread_is_called_out_by_the_name_of_its_setting() -> None:
    (told,) = doubts(with_measurement(seconds=WIDE))
    assert "decode of batch 1, context 256 by 17%" in told
    assert "1 of 4" in told
    assert "context 32" not in told
    assert "--rounds" in told
    (told,) = doubts(dataclasses.replace(SOUND, measurements=(measurement("prefill", 9, WIDE),)))
    assert "prefill of batch 1, prompt 9 by 17%" in told


def test_an_outlier_is_no_wide_spread() -> None:
    assert doubts(with_measurement(seconds=NARROW)) == []


def test_a_wide_spread_of_the_ceiling_is_called_out() -> None:
    readings = tuple(
        dataclasses.replace(each, bytes=round(10 * GB * rate))
        for each, rate in zip(SOUND.readings, WIDE, strict=True)
    )
    (told,) = doubts(dataclasses.replace(SOUND, readings=readings))
    assert "the read ceiling by " in told


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (with_readings(cpu_seconds=1.7), "the 2 threads that read the ceiling got 1.70 cores"),
        (with_measurement(pages_from_disk=3), "21 pages came from disk .* context 256"),
        (
            dataclasses.replace(SOUND, options=BenchOptions(rounds=4)),
            "too few rounds to tell a spread from: 4",
        ),
        (
            dataclasses.replace(
                SOUND, engine=dataclasses.replace(SOUND.engine, weight_bytes=32 << 20)
            ),
            r"all weights \(33.6 MB\) fit the processor's caches \(33.6 MB\)",
        ),
        (
            with_measurement(ceiling=4.0 * GB),
            r"more than the ceiling was reached: decode of batch 1, context 256 \(125%\)",
        ),
    ],
    ids=["other programs", "disk", "rounds", "caches", "above"],
)
def test_what_is_planted_is_called_out_alone(
    planted: Bench, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (told,) = doubts(planted)
    assert re.search(said, told)
    print_bench(planted)
    printed = capsys.readouterr().out
    assert printed.count("DOUBTFUL: ") == 1
    assert told in " ".join(printed.split())


def test_a_share_is_the_bytes_over_time_and_ceiling() -> None:
    (share,) = {each.share.median for each in SOUND.measurements if each.share is not None}
    assert share == pytest.approx(0.5)


def test_the_table_holds_every_setting_and_says_what_is_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_bench(SOUND)
    out, err = capsys.readouterr()
    assert err == ""
    assert "DOUBTFUL" not in out
    assert "peak memory unknown private" in out
    assert "kernels built into ONNX Runtime: a test" in out
    rows = [line.replace(",", "").split() for line in out.splitlines()]
    prefill, *decode = [row for row in rows if row[:1] == ["1"]]
    assert prefill[:3] == ["1", "128", "128.0"]
    assert [row[:3] for row in decode] == [["1", "32", "1000"], ["1", "256", "1000"]]
    assert decode[0][3:] == ["995.0-1005", "980.0-1020", "1.00", "5000", "50%", "1.00"]


@pytest.mark.parametrize("width", [80, 200])
def test_no_figure_is_cut_where_the_terminal_is_narrow(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export_grok.runtime.bench.table.WIDTH", width)
    print_bench(with_measurement(seconds=(9.876,) * 7))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    (row,) = (line.replace(",", "").split() for line in lines if line.startswith("    1      256"))
    assert row[2:4] == ["9876", "9876-9876"]
    assert row[-4:] == ["0.10", "5000", "5%", "0.10"]


def test_json_values_hold_every_sample() -> None:
    value = SOUND.to_dict()
    assert [each["seconds"] for each in value["decode"][0]["samples"]] == [(s,) for s in STEADY]
    assert len(value["ceiling"]["samples"]) == len(SOUND.readings)
    assert value["decode"][1]["step_bytes"]["total"] == 5 * GB
