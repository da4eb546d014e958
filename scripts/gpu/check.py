"""Step a: every kernel as TensorRT would launch it, held to its formula in float64.

Inputs are drawn anew in each round. Outputs, and what lies around all tensors, are NaN before a
launch: what is not written shows, and what is read or written beside a tensor. Each kernel runs
twice on the same inputs and must give the same bits.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import click
import numpy as np

from export_grok.config import DTYPES
from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.errors import BuildError
from export_grok.plugins.ptx.compiler import compile_all, compiled
from scripts.gpu.cases import Case, all_sizes, odd_cases
from scripts.gpu.device import Gpu, KernelDevice
from scripts.gpu.inputs import Array, random_inputs
from scripts.gpu.launch import Compiled, arguments, dtypes_of, place, placed_output
from scripts.gpu.references import Within, reference, sampled
from scripts.gpu.report import table
from scripts.gpu.step import Options, Outcome

__all__ = [
    "SPARE",
    "Checked",
    "all_cases",
    "check_case",
    "check_cases",
    "check_kernels",
    "compiled_cases",
    "faults_of",
]

# Device memory that is left alone.
SPARE = 512 << 20
# Wrong calls that the summary names; the others are in the lines above it, and in the JSON.
NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What came of a case.

    Attributes:
        case: which.
        excess: largest error as a part of its bound.
        faults: what is wrong, one line each.
        skipped: why it was not run; empty if it was.
    """

    case: Case
    excess: float = 0.0
    faults: tuple[str, ...] = ()
    skipped: str = ""


def check_kernels(options: Options) -> Outcome:
    """Check all kernels on the GPU at hand."""
    gpu = Gpu()
    cases = all_cases(full=options.full)
    made = compiled_cases(cases, gpu.sm)
    return outcome(check_cases(gpu, cases, made, options), len(cases), options)


def check_cases(
    device: KernelDevice,
    cases: Sequence[Case],
    made: Sequence[Compiled | BuildError],
    options: Options,
) -> list[Checked]:
    """Check one case after the other, until the device can be used no more."""
    random = np.random.default_rng(options.seed)
    checked = []
    for case, kernel in zip(cases, made, strict=True):
        broken = False
        try:
            if isinstance(kernel, BuildError):
                raise kernel
            found = check_case(device, case, kernel, random, options)
        except BuildError as error:
            found = Checked(case=case, faults=(str(error),))
        except Exception as error:  # of CUDA: no call works in this process behind it
            found = Checked(case=case, faults=(f"{type(error).__name__}: {error}",))
            broken = True
        checked.append(found)
        click.echo(f"  {case.name}: {_told(found)}")
        if broken:
            break
    return checked


def all_cases(*, full: bool) -> list[Case]:
    """Return the calls in each dtype; not full: the odd ones alone."""
    made = all_sizes if full else odd_cases
    cases = [case for dtype in DTYPES for case in made(dtype)]
    return list({case.name: case for case in cases}.values())


def compiled_cases(cases: Sequence[Case], sm: int) -> list[Compiled | BuildError]:
    """Return the kernel of each case, from the disk or compiled; or why it does not compile."""
    with contextlib.suppress(BuildError):  # of one, which is told below
        compile_all([(case.node, case.call, sm) for case in cases])
    return [_compiled(case, sm) for case in cases]


def _compiled(case: Case, sm: int) -> Compiled | BuildError:
    try:
        kernel = compiled(case.node, case.call, sm)
        launch = case.node.launch(case.call)
    except BuildError as error:
        return error
    return Compiled(node=case.node, call=case.call, launch=launch, kernel=kernel)


def check_case(
    device: KernelDevice,
    case: Case,
    kernel: Compiled,
    random: np.random.Generator,
    options: Options,
) -> Checked:
    """Check one kernel in several rounds."""
    needed = _bytes(kernel)
    if needed + SPARE > device.memory().free:
        return Checked(case=case, skipped=f"needs {needed / 1e9:.1f} GB of device memory")
    excess, faults = 0.0, dict[str, None]()
    _, dtypes = dtypes_of(kernel)
    for _ in range(options.rounds):
        inputs = random_inputs(case, random)
        addresses = {name: place(device, array) for name, array in inputs.items()}
        outputs = [
            placed_output(device, shape, dtype)
            for shape, dtype in zip(kernel.node.output_shapes(case.call), dtypes, strict=True)
        ]
        passed = arguments(kernel, addresses, [output.address for output in outputs])
        runs = []
        for _again in range(2):
            for output in outputs:
                output.poison(device)
            device.launch(kernel, passed)
            runs.append([output.fetch(device) for output in outputs])
        found, others = ([array for array, _ in run] for run in runs)
        if not all(intact for run in runs for _, intact in run):
            faults["something is written outside an output"] = None
        if any(one.tobytes() != other.tobytes() for one, other in zip(found, others, strict=True)):
            faults["two runs differ"] = None
        device.release()
        columns = _columns(case, found, random, options.columns)
        expected = reference(case.op_type, case.call, inputs, columns)
        names = [row.name for row in kernel.node.outputs]
        for name, within, whole in zip(names, expected, found, strict=True):
            part = whole[..., columns] if sampled(case.op_type) else whole
            excess = max(excess, within.excess(part))
            faults |= dict.fromkeys(faults_of(name, within, whole, part))
    return Checked(case=case, excess=excess, faults=tuple(faults))


def faults_of(name: str, within: Within, whole: Array, part: Array) -> list[str]:
    """Return what is wrong with an output, of which a part is held to the formula."""
    faults = []
    unwritten = int(np.isnan(whole).sum())
    if unwritten:
        faults.append(f"{unwritten} of {whole.size} elements of {name} are NaN, or not written")
    errors = within.errors(part)
    if (errors > 1).any():
        faults.append(
            f"{name} is off by {errors.max():.3g} times its bound, "
            f"{int((errors > 1).sum())} of {part.size} elements looked at are beyond it"
        )
    return faults


def outcome(checked: Sequence[Checked], count: int, options: Options) -> Outcome:
    """Return what came of the cases that were checked, of so many."""
    ran = [found for found in checked if not found.skipped]
    wrong = [found for found in ran if found.faults]
    groups: dict[tuple[str, str], list[Checked]] = {}
    for found in ran:
        groups.setdefault((found.case.op_type, found.case.call.dtype), []).append(found)
    rows = [
        [op_type, dtype, str(len(some)), f"{max(found.excess for found in some):.2g}"]
        for (op_type, dtype), some in groups.items()
    ]
    text = f"{len(ran) - len(wrong)} of {len(ran)} calls are right, seed {options.seed}"
    if len(ran) < len(checked):
        text += f"; {len(checked) - len(ran)} need more device memory than there is"
    if len(checked) < count:
        text += f"; {count - len(checked)} were not reached: the GPU cannot be used any more"
    if wrong:
        text += "; wrong: " + ", ".join(found.case.name for found in wrong[:NAMED])
        text += f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    return Outcome(
        status="fail" if wrong or not ran else "pass",
        text=text,
        figures={
            "seed": options.seed,
            "cases": [
                {
                    "name": found.case.name,
                    "excess": found.excess,
                    "faults": list(found.faults),
                    "skipped": found.skipped,
                }
                for found in checked
            ],
        },
        table=table(["node", "T", "calls", "largest error / its bound"], rows),
    )


def _told(found: Checked) -> str:
    if found.skipped:
        return f"skipped: {found.skipped}"
    return "; ".join(found.faults) or f"right, {found.excess:.2g} of the bound"


def _columns(
    case: Case, found: Sequence[Array], random: np.random.Generator, count: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | slice:
    """Return columns to look at: the first, the last, and any others; all of few."""
    width = found[0].shape[-1]
    if not sampled(case.op_type) or width <= 8 * count:
        return slice(None)
    return np.union1d(random.choice(width, count, replace=False), [0, width - 1])


def _bytes(kernel: Compiled) -> int:
    """Return the device memory that a case takes."""
    inputs, outputs = dtypes_of(kernel)
    shapes = [(kernel.call.shapes[name], dtype) for name, dtype in inputs.items()]
    shapes += zip(kernel.node.output_shapes(kernel.call), outputs, strict=True)
    return sum(math.prod(shape) * ELEMENTS[dtype].itemsize for shape, dtype in shapes)
