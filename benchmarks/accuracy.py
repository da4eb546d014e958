"""Measure how exact engines are, and whether `export-grok verify` finds every known mistake.

    python benchmarks/accuracy.py --report docs/accuracy.md

The engines are those of the demo model and of the reference models in tests/data, built into a
folder that is removed afterwards. No time is measured. Needed is

    pip install -c constraints.txt -e ".[verify]"
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from accuracy_bfloat16 import bfloat16_section
from sections import write_section
from stages import told_in_a_line

from export_grok.artifacts import open_bundle
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.planting import plant_fault, why_not
from export_grok.runtime.verify.tolerances import TENSORS

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
MODELS = ("demo", "tiny", "tiny8", "deep13")
KERNELS = ("native", "builtin")

NOISE_ABOVE = """\
## What right engines are off by

The largest error of each tensor over the {models} models, all layers and steps, and in brackets
the part of the tolerance that it is, where that part is largest. "The original" is the part of the
tolerance by which the engine with native kernels is off from what the original program computed.

{table}

{flips} of {choices} choices of experts differed from the reference's; only near ties may. Running
free: {free}."""

FAULTS_ABOVE = """\
## Mistakes that are found

Each mistake was planted in the files of an engine, of the demo if not said otherwise and there in
the middle layer, if it is a layer's; then `export-grok verify` was run. "Seen first in" is the
graph and the tensor that it named. "Times" is the error there in tolerances. "Named" says whether
the likely cause that it told is just this mistake.

{table}

{rest}"""

AGAIN = """\
Again:

    python benchmarks/accuracy.py --report docs/accuracy.md"""


@click.command()
@click.option(
    "--full-layer",
    type=click.Path(path_type=Path),
    help="Engine of real size to measure too, e.g. of benchmarks/full_layer.py.",
)
@click.option(
    "--report", type=click.Path(path_type=Path), help="Markdown file to write sections of."
)
def main(full_layer: Path | None, report: Path | None) -> None:
    """Verify right and wrong engines and print what came out."""
    with told_in_a_line(), tempfile.TemporaryDirectory() as scratch:
        engines = {name: _engine(name, Path(scratch)) for name in MODELS}
        engines["demo, 2 ranks"] = _engine("demo", Path(scratch), "--tp", "2")
        right = {name: engines[name] for name in MODELS}
        sections = {
            "noise": _noise(right | ({"full-size layer": full_layer} if full_layer else {})),
            "faults": _faults(engines, Path(scratch)),
            "bfloat16": bfloat16_section({name: DATA / name for name in MODELS[1:]}),
        }
        for name, above in sections.items():
            click.echo(f"{above}\n")
            if report:
                write_section(report, name, above=above, below=AGAIN)


def _engine(name: str, scratch: Path, *options: str) -> Path:
    checkpoint, out = DATA / name, scratch / "_".join(["engine", name, *options])
    if name == "demo":
        checkpoint = scratch / "demo"
        if not checkpoint.exists():
            _run("demo-checkpoint", checkpoint)
    _run("build-engine", checkpoint, "--out", out, "--allow-functions", *options)
    return out


def _run(*arguments: str | Path, kernels: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"EXPORT_GROK_KERNELS": kernels} if kernels else {})
    command = [sys.executable, "-m", "export_grok", *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode and "verify" not in arguments:
        raise click.ClickException(run.stderr.strip())
    return run


def _verified(engine: Path, *options: str, kernels: str = "") -> dict[str, Any]:
    run = _run("verify", engine, "--json", *options, kernels=kernels)
    if not run.stdout:
        raise click.ClickException(run.stderr.strip())
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@dataclass(kw_only=True)
class _Largest:
    """The largest error of a tensor, and the largest part of a tolerance."""

    error: float = 0.0
    part: float = 0.0
    compared: bool = False

    @property
    def part_if_any(self) -> str:
        return f"{self.part:.2f}" if self.compared else ""

    def add(self, deviation: Mapping[str, Any]) -> None:
        self.compared = True
        self.error = max(self.error, deviation["error"])
        if deviation["tolerance"]:
            self.part = max(self.part, deviation["error"] / deviation["tolerance"])

    def __str__(self) -> str:
        return f"{self.error:.1e} ({self.part:.2f})"


def _noise(engines: Mapping[str, Path]) -> str:
    largest = {
        kernels: {tensor: _Largest() for tensor in TENSORS} for kernels in (*KERNELS, "goldens")
    }
    free = {kernels: _Largest() for kernels in KERNELS}
    flips = choices = 0
    for name, engine in engines.items():
        for kernels in KERNELS:
            found = _verified(engine, kernels=kernels)
            _check_passed(name, found)
            for deviation in _deviations(found):
                largest[kernels][deviation["tensor"]].add(deviation)
            flips += sum(graph["flips"] for graph in found["graphs"])
            choices += sum(graph["choices"] for graph in found["graphs"])
            error = max(found["free_run"]["error"].values())
            free[kernels].add({"error": error, "tolerance": found["free_run"]["tolerance"]})
        if (DATA / name).exists():
            found = _verified(engine, "--against", "goldens", kernels="native")
            _check_passed(name, found)
            for deviation in _deviations(found):
                largest["goldens"][deviation["tensor"]].add(deviation)
    rows = [
        f"| {tensor} | {largest['native'][tensor]} | {largest['builtin'][tensor]} "
        f"| {largest['goldens'][tensor].part_if_any} |"
        for tensor in TENSORS
        if tensor not in ("experts", "free run")
    ]
    head = ["| tensor | native kernels | built-in kernels | the original |", "|---|---|---|---|"]
    return NOISE_ABOVE.format(
        models=", ".join(engines),
        table="\n".join(head + rows),
        flips=flips or "None",
        choices=f"{choices:,}",
        free=f"{free['native']} with native kernels, {free['builtin']} with built-in ones",
    )


def _check_passed(name: str, found: Mapping[str, Any]) -> None:
    if not found["passed"]:
        raise click.ClickException(f"{name} failed against {found['reference']}")


def _deviations(found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for graph in found["graphs"]:
        yield from graph["deviations"]


def _faults(engines: Mapping[str, Path], scratch: Path) -> str:
    rows, rest = [], []
    for name, fault in FAULTS.items():
        bundles = {model: open_bundle(engine) for model, engine in engines.items()}
        model = next((each for each in bundles if why_not(fault, bundles[each]) is None), None)
        if model is None:
            raise click.ClickException(f"{name} can be planted in none of {', '.join(engines)}")
        wrong = scratch / f"wrong_{name}"
        plant_fault(bundles[model], fault, wrong)
        found = _verified(wrong)
        failed = next((graph for graph in found["graphs"] if not graph["passed"]), None)
        if failed is None:
            rest.append(f"**Not found: {name}.**")
            continue
        first = next(
            one
            for one in failed["deviations"]
            if one["error"] is None or one["error"] > one["tolerance"]
        )
        times = "all" if not first["tolerance"] else _times(first)
        cause = found["cause"] and found["cause"]["fault"]
        named = "yes" if cause == name else cause or "no"
        where = "" if model == "demo" else f" ({model})"
        rows.append(
            f"| {fault.title}{where} | {failed['graph']}, {first['tensor']} | {times} | {named} |"
        )
    head = ["| mistake | seen first in | times | named |", "|---|---|---|---|"]
    rest.append(f"{len(rows)} of {len(FAULTS)} are found.")
    return FAULTS_ABOVE.format(table="\n".join(head + rows), rest=" ".join(rest))


def _times(deviation: Mapping[str, Any]) -> str:
    if deviation["error"] is None:
        return "no number"
    times = deviation["error"] / deviation["tolerance"]
    return f"{times:,.0f}" if times < 1e6 else f"{times:.0e}"


if __name__ == "__main__":
    main()
