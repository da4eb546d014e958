"""What a benchmark found: every sample, and the figures that follow from them."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_grok.machine import Machine
from export_grok.plugins.kernels import Kernels
from export_grok.runtime.bench.ceiling import Reading
from export_grok.runtime.bench.options import BenchOptions, Setting
from export_grok.runtime.bench.traffic import Traffic

__all__ = ["Bench", "Engine", "Measurement", "Sample", "Spread"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How values lie.

    Attributes:
        low: the first quartile: a quarter of the values is below.
        high: the third quartile.
    """

    median: float
    low: float
    high: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of one value or more."""
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive")
            if len(values) > 1
            else (values[0],) * 3
        )
        return cls(median=median, low=low, high=high, smallest=min(values), largest=max(values))

    @property
    def relative(self) -> float:
        """The interquartile range as a part of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One round of one setting.

    Attributes:
        seconds: of each step of decoding; of a prefill, its only figure.
        cpu_seconds: processor time of all threads.
        pages_from_disk: that the process had to wait for.
        ceiling: bytes per second of the readings just before and after, their mean.
    """

    seconds: tuple[float, ...]
    cpu_seconds: float
    pages_from_disk: int
    ceiling: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, on average."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def busy(self) -> float:
        """Cores that were at work, on average."""
        return self.cpu_seconds / sum(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One setting, measured in every round.

    Attributes:
        traffic: what a step of decoding reads; None for a prefill.
    """

    setting: Setting
    samples: tuple[Sample, ...]
    traffic: Traffic | None

    @property
    def step_seconds(self) -> Spread:
        """Seconds until each row has its next token; of a prefill, its first."""
        return Spread.of([sample.step_seconds for sample in self.samples])

    @property
    def tokens_per_second(self) -> Spread:
        """Tokens of all rows together: new ones, or those of the prompts."""
        of_a_row = self.setting.tokens if self.setting.stage == "prefill" else 1
        tokens = self.setting.batch * of_a_row
        return Spread.of([tokens / sample.step_seconds for sample in self.samples])

    @property
    def share(self) -> Spread | None:
        """Which part of the ceiling was reached: the bytes of a step / (its time * ceiling)."""
        if self.traffic is None:
            return None
        bytes_ = self.traffic.total
        return Spread.of(
            [bytes_ / (sample.step_seconds * sample.ceiling) for sample in self.samples]
        )

    @property
    def busy(self) -> float:
        """Cores that were at work, the median."""
        return statistics.median(sample.busy for sample in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Return the samples and the figures as JSON values."""
        value = dataclasses.asdict(self.setting) | {
            "tokens_per_second": dataclasses.asdict(self.tokens_per_second),
            "step_seconds": dataclasses.asdict(self.step_seconds),
            "cores_busy": self.busy,
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }
        if self.traffic is not None and self.share is not None:
            read = dataclasses.asdict(self.traffic) | {"total": self.traffic.total}
            value |= {"step_bytes": read, "share_of_ceiling": dataclasses.asdict(self.share)}
        return value


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What was measured.

    Attributes:
        folder: of the bundle.
        weight_bytes: of the stored weights.
        version: of what runs the backend's engines.
        check_seconds: to read the manifest and hold the files to it.
        load_seconds: for each batch, to load the engine and run a first token through it.
        private: peak of the process's own memory in bytes, after loading and one round, with the
            engines of all batches open; None where the system does not say.
        mapped: peak of the mapped files that were in memory, likewise.
    """

    folder: Path
    backend: str
    version: str
    kernels: Kernels
    weight_bytes: int
    check_seconds: float
    load_seconds: dict[int, float]
    private: int | None
    mapped: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        library = self.kernels.library
        return dataclasses.asdict(self) | {
            "folder": str(self.folder),
            "kernels": {
                "library": None if library is None else str(library),
                "isa": self.kernels.isa,
                "reason": self.kernels.reason,
            },
        }


@dataclass(frozen=True, kw_only=True)
class Bench:
    """All that a benchmark found.

    Attributes:
        cache_bytes: of the processor's last-level caches; None where the system does not say.
        threads: of the engine, and of the reader.
        method: how the reader reads, in words.
        readings: in the order they were made: before the first setting, and after each one.
        measurements: in the order of a round.
    """

    engine: Engine
    machine: Machine
    options: BenchOptions
    cache_bytes: int | None
    threads: int
    method: str
    readings: tuple[Reading, ...]
    measurements: tuple[Measurement, ...]

    @property
    def ceiling(self) -> Spread:
        """Bytes per second of the readings."""
        return Spread.of([reading.rate for reading in self.readings])

    @property
    def reader_busy(self) -> float:
        """Cores that were at work while the reader read, the median."""
        return statistics.median(reading.busy for reading in self.readings)

    def of_stage(self, stage: str) -> list[Measurement]:
        """Return the measurements of "prefill" or "decode"."""
        return [each for each in self.measurements if each.setting.stage == stage]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "engine": self.engine.to_dict(),
            "machine": dataclasses.asdict(self.machine)
            | {"cache_bytes": self.cache_bytes, "threads": self.threads},
            "options": dataclasses.asdict(self.options),
            "ceiling": {
                "method": self.method,
                "bytes_per_second": dataclasses.asdict(self.ceiling),
                "cores_busy": self.reader_busy,
                "samples": [dataclasses.asdict(reading) for reading in self.readings],
            },
            **{
                stage: [each.to_dict() for each in self.of_stage(stage)]
                for stage in ("prefill", "decode")
            },
        }
