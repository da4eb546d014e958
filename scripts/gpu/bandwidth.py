"""Step b: what share of the memory bandwidth each kernel reaches.

Decoding is reading: a kernel is as good as the bytes it moves in its time. They are compared
with what a kernel that does nothing but read reaches on the same GPU, by turns, so that both meet
the same clocks. Launches go through so many copies of the inputs that the second-level cache holds
none when its turn comes again. They are replayed as a CUDA graph, as a decode step is.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np

from export_grok.config import Dtype
from export_grok.errors import BuildError
from scripts.gpu.cases import BATCHES, TENSOR_PARALLEL, Case, decode_cases, prefill_cases
from scripts.gpu.check import SPARE, compiled_cases
from scripts.gpu.device import Gpu, KernelDevice
from scripts.gpu.inputs import Array, random_codes, spread_inputs
from scripts.gpu.launch import Argument, Compiled, arguments, dtypes_of, place, placed_output
from scripts.gpu.reader import reader
from scripts.gpu.report import table
from scripts.gpu.step import Options, Outcome
from scripts.gpu.traffic import traffic

__all__ = [
    "Bandwidth",
    "Measured",
    "benchmark_cases",
    "measure_case",
    "measure_cases",
    "measure_kernels",
    "reading",
]

# Times the second-level cache that lies between two reads of the same bytes.
CACHES = 4
READ_BYTES = 1 << 30
# A sample is so many launches that it takes so long: far above what an event is exact to.
SAMPLE_MS = 2.0
MOST_LAUNCHES = 256

# Reads once, and returns the bytes per millisecond that it was read at.
Rate = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A kernel's times.

    Attributes:
        case: which.
        moved: bytes that it needs to move, as `traffic` counts them.
        microseconds: of a launch, of each sample.
        shares: its bytes per second over those of the reader in the same turn, of each sample.
        copies: of the inputs, that launches went through.
    """

    case: Case
    moved: int
    microseconds: tuple[float, ...]
    shares: tuple[float, ...]
    copies: int

    @property
    def rate(self) -> float:
        """Median, in GB/s."""
        return self.moved / statistics.median(self.microseconds) / 1e3


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What the memory gives, in GB/s: read alone, and copied, read and written bytes together."""

    read: float
    copy: float


def measure_kernels(options: Options) -> Outcome:
    """Measure the kernels of Grok-1's layers on the GPU at hand; not full: those of one of 8."""
    ranks = TENSOR_PARALLEL if options.full else TENSOR_PARALLEL[-1:]
    cases = benchmark_cases("bfloat16", ranks=ranks)
    return measure_cases(Gpu(), cases, options)


def benchmark_cases(
    dtype: Dtype, *, ranks: Iterable[int] = TENSOR_PARALLEL, batches: Iterable[int] = BATCHES
) -> list[Case]:
    """Return the calls of a decode step for several batches, and the matrices of prefill."""
    batches = tuple(batches)
    return [
        case
        for count in ranks
        for case in (
            *(case for batch in batches for case in decode_cases(dtype, count, batch)),
            *prefill_cases(dtype, count),
        )
    ]


def measure_cases(gpu: Gpu, cases: Sequence[Case], options: Options) -> Outcome:
    """Measure some kernels."""
    made = compiled_cases(cases, gpu.sm)
    random = np.random.default_rng(options.seed)
    beside = Gpu()  # the same GPU; its memory stays when that of a case is given back
    read_rate = reading(beside, random)
    limits = bandwidth(gpu, read_rate, samples=options.samples)
    gpu.release()
    measured, left_out = [], []
    for case, compiled in zip(cases, made, strict=True):
        if isinstance(compiled, BuildError):
            left_out.append(case.name)
            click.echo(f"  {case.name}: {compiled}")
            continue
        found = measure_case(gpu, case, compiled, random, read_rate, samples=options.samples)
        gpu.release()
        if found is None:
            left_out.append(case.name)
            click.echo(f"  {case.name}: needs more device memory than there is")
            continue
        measured.append(found)
        click.echo(f"  {case.name}: {' '.join(_row(found)[3:])}")
    return outcome(gpu.name, measured, left_out, limits)


def measure_case(
    device: KernelDevice,
    case: Case,
    compiled: Compiled,
    random: np.random.Generator,
    read_rate: Rate,
    *,
    samples: int,
) -> Measured | None:
    """Return the times of a kernel; None if the device has not the memory."""
    inputs = spread_inputs(case, random)
    moved, whole = traffic(compiled, inputs), sum(array.nbytes for array in inputs.values())
    copies = max(1, math.ceil(CACHES * device.l2_bytes / moved))
    if copies * whole + SPARE > device.memory().free:
        return None
    passed = _arguments(device, compiled, inputs, copies)

    def launches(count: int) -> Callable[[], None]:
        def work() -> None:
            for some in itertools.islice(itertools.cycle(passed), count):
                device.launch(compiled, some)

        return work

    device.milliseconds(launches(copies))  # the driver compiles at the first launch
    one = device.milliseconds(launches(copies)) / copies
    most = min(MOST_LAUNCHES, math.ceil(SAMPLE_MS / one))
    count = copies * math.ceil(most / copies)
    work = device.captured(launches(count))
    work()
    microseconds, shares = [], []
    for _ in range(samples):
        rate = read_rate()
        own = device.milliseconds(work) / count
        microseconds.append(1e3 * own)
        shares.append(moved / own / rate)
    return Measured(
        case=case,
        moved=moved,
        microseconds=tuple(microseconds),
        shares=tuple(shares),
        copies=copies,
    )


def _arguments(
    device: KernelDevice, compiled: Compiled, inputs: Mapping[str, Array], copies: int
) -> list[tuple[Argument, ...]]:
    """Return the arguments of a launch for each of so many copies of the inputs."""
    _, dtypes = dtypes_of(compiled)
    shapes = compiled.node.output_shapes(compiled.call)
    outputs = [placed_output(device, *row) for row in zip(shapes, dtypes, strict=True)]
    first = {name: place(device, array) for name, array in inputs.items()}
    sets = [first]
    for _ in range(copies - 1):
        others = {name: device.allocate(array.nbytes) for name, array in inputs.items()}
        for name, array in inputs.items():
            device.copy(others[name], first[name], array.nbytes)
        sets.append(others)
    return [arguments(compiled, some, [output.address for output in outputs]) for some in sets]


def reading(device: KernelDevice, random: np.random.Generator) -> Rate:
    """Return what reads a large piece of memory and tells at how many bytes per millisecond.

    Raises:
        AssertionError: it has not read them all.
    """
    compiled = reader(READ_BYTES, device.multiprocessors)
    (words,) = compiled.call.shapes["source"]
    content = random_codes(random, (4 * words,)).view(np.uint32)
    (shape,) = compiled.node.output_shapes(compiled.call)
    result = placed_output(device, shape, "float32")
    passed = arguments(compiled, {"source": place(device, content)}, [result.address])
    device.launch(compiled, passed)
    found, _ = result.fetch(device)
    if np.bitwise_xor.reduce(found.view(np.uint32), None) != np.bitwise_xor.reduce(content):
        raise AssertionError("the reading kernel has not read what is there")
    read = device.captured(lambda: device.launch(compiled, passed))
    return lambda: content.nbytes / device.milliseconds(read)


def bandwidth(device: KernelDevice, read_rate: Rate, *, samples: int) -> Bandwidth:
    """Return what the memory gives: the reader, and the driver's own copy, by turns."""
    source, target = device.allocate(READ_BYTES), device.allocate(READ_BYTES)
    device.fill(source, READ_BYTES, 0xA5)
    reads, copies = [], []
    for _ in range(samples):
        reads.append(read_rate())
        took = device.milliseconds(lambda: device.copy(target, source, READ_BYTES))
        copies.append(2 * READ_BYTES / took)
    return Bandwidth(read=statistics.median(reads) / 1e6, copy=statistics.median(copies) / 1e6)


def outcome(
    name: str, measured: Sequence[Measured], left_out: Sequence[str], limits: Bandwidth
) -> Outcome:
    """Return what was measured. There is no figure to reach: a measurement does not fail."""
    text = f"{name}: {limits.read:.0f} GB/s read, {limits.copy:.0f} GB/s copied"
    if measured:
        shares = [statistics.median(found.shares) for found in measured]
        text += f"; kernels reach {min(shares):.0%} to {max(shares):.0%} of reading"
    if left_out:
        text += f"; not measured: {', '.join(left_out)}"
    head = ["node", "use", "T", "MB", "us", "GB/s", "of reading", "middle half"]
    return Outcome(
        status="pass" if measured else "fail",
        text=text,
        figures={
            **asdict(limits),
            "kernels": [
                {
                    "name": found.case.name,
                    "bytes": found.moved,
                    "microseconds": list(found.microseconds),
                    "shares": list(found.shares),
                    "copies": found.copies,
                }
                for found in measured
            ],
            "left_out": list(left_out),
        },
        table=table(head, [_row(found) for found in measured]),
    )


def _row(found: Measured) -> list[str]:
    low, high = np.quantile(found.shares, [0.25, 0.75])
    return [
        found.case.op_type,
        found.case.use,
        found.case.call.dtype,
        f"{found.moved / 1e6:.1f}",
        f"{statistics.median(found.microseconds):.1f}",
        f"{found.rate:.0f}",
        f"{statistics.median(found.shares):.0%}",
        f"{low:.0%}-{high:.0%}",
    ]
