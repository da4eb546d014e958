"""What to run first on a machine with an NVIDIA GPU: each step says pass or fail, with figures.

    python -m scripts.first_gpu_hour [--steps a,b] [--small] [--json FILE] [--report docs/gpu.md]

It is started in the root of the checkout. What each step shows is told in docs/gpu.md. Steps 0, a
and b need the driver and

    pip install -e ".[gpu]"

the others TensorRT too, and `[export]` to make graphs. A step that fails does not stop the others:
each runs in a process of its own. The exit code is 1 if one failed.
"""

import secrets
import sys
import tempfile
from pathlib import Path

import click

from export_grok.engines.trt.module import first_gpu
from export_grok.errors import ExportGrokError
from scripts.gpu.child import in_child
from scripts.gpu.report import line, summary, write_json, write_report
from scripts.gpu.step import Options, Outcome
from scripts.gpu.steps import STEPS, step_of

__all__ = ["main"]

KEYS = tuple(step.key for step in STEPS)
POSITIVE = click.IntRange(min=1)


def _keys(_context: click.Context, _option: click.Parameter, value: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in value.split(","))
    unknown = [key for key in keys if key not in KEYS]
    if unknown:
        raise click.BadParameter(f"there is no step {', '.join(unknown)}; use {','.join(KEYS)}")
    return tuple(key for key in KEYS if key in keys)


@click.command(context_settings={"show_default": True})
@click.option("--steps", "keys", default=",".join(KEYS), callback=_keys, help="Which to run.")
@click.option("--full/--small", default=True, help="Take the sizes of Grok-1 too.")
@click.option("--rounds", type=POSITIVE, default=2, help="Fresh inputs for each kernel of step a.")
@click.option(
    "--columns", type=POSITIVE, default=64, help="Of large results, held to float64 in each round."
)
@click.option("--samples", type=POSITIVE, default=15, help="Of each time.")
@click.option(
    "--backend", type=click.Choice(["trt", "trt-rtx"]), default="trt", help="Of steps 1-7."
)
@click.option("--seed", type=int, help="Of all random numbers; another in each run by default.")
@click.option("--timeout", default=3600.0, help="Of a step, in seconds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File for all figures.")
@click.option("--report", type=click.Path(path_type=Path), help="Markdown file for the results.")
def main(
    keys: tuple[str, ...],
    full: bool,
    rounds: int,
    columns: int,
    samples: int,
    backend: str,
    seed: int | None,
    timeout: float,
    json_file: Path | None,
    report: Path | None,
) -> None:
    """Run the steps on the GPU at hand."""
    try:
        first_gpu()
    except ExportGrokError as error:
        raise click.ClickException(str(error)) from error
    outcomes: dict[str, Outcome] = {}
    command = " ".join(["python -m scripts.first_gpu_hour", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="first_gpu_hour_") as folder:
        options = Options(
            full=full,
            rounds=rounds,
            columns=columns,
            samples=samples,
            backend=backend,
            folder=folder,
            seed=secrets.randbits(32) if seed is None else seed,
        )
        click.echo(f"seed {options.seed}")
        for key in keys:
            step = step_of(key)
            click.echo(f"step {key}: {step.title}")
            outcomes[key] = outcome = in_child(step, options, timeout=timeout)
            click.echo(line(key, outcome))
            for part in (outcome.figures.get("traceback"), outcome.table):
                if part:
                    click.echo(part)
            _write(json_file, report, outcomes, command)  # whatever may break the next step
    click.echo(summary(outcomes))
    if any(outcome.status == "fail" for outcome in outcomes.values()):
        sys.exit(1)


def _write(
    json_file: Path | None, report: Path | None, outcomes: dict[str, Outcome], command: str
) -> None:
    try:
        if json_file:
            write_json(json_file, outcomes, command)
        if report:
            write_report(report, outcomes, command)
    except ExportGrokError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
