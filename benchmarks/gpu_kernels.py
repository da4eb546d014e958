"""Measure what share of a GPU's memory bandwidth each kernel of the TensorRT plugins reaches.

    python -m benchmarks.gpu_kernels [--dtype bfloat16] [--tp 8] [--batch 1] [--json FILE]

It is started in the root of the checkout, on a machine with an NVIDIA GPU. This is step b of
`scripts.first_gpu_hour` with a choice of kernels: there it is told how times are taken.
"""

import json
from dataclasses import asdict
from pathlib import Path

import click

from export_grok.config import DTYPES, Dtype
from export_grok.engines.trt.module import first_gpu
from export_grok.errors import ExportGrokError
from export_grok.files import atomic_file
from scripts.gpu.bandwidth import benchmark_cases, measure_cases
from scripts.gpu.device import Gpu
from scripts.gpu.step import Options, Outcome

__all__ = ["main"]


@click.command(context_settings={"show_default": True})
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Of the graphs.")
@click.option("--tp", "ranks", multiple=True, default=(1, 8), help="Ranks that share a layer.")
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 4, 8),
    help="Rows of a step.",
)
@click.option(
    "--op", "nodes", multiple=True, help="Plugin node, e.g. GrokMoeDown; all by default."
)
@click.option("--samples", type=click.IntRange(min=1), default=15, help="Of each time.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File for all figures.")
def main(
    dtype: Dtype,
    ranks: tuple[int, ...],
    batches: tuple[int, ...],
    nodes: tuple[str, ...],
    samples: int,
    json_file: Path | None,
) -> None:
    """Measure the kernels of Grok-1's layers on the GPU at hand."""
    try:
        outcome = _measured(dtype, ranks, batches, nodes, samples)
        click.echo(f"{outcome.text}\n\n{outcome.table}")
        if json_file:
            with atomic_file(json_file) as file:
                file.write(json.dumps(asdict(outcome), indent=1).encode())
    except ExportGrokError as error:
        raise click.ClickException(str(error)) from error


def _measured(
    dtype: Dtype,
    ranks: tuple[int, ...],
    batches: tuple[int, ...],
    nodes: tuple[str, ...],
    samples: int,
) -> Outcome:
    first_gpu()  # says at once what is missing
    cases = benchmark_cases(dtype, ranks=ranks, batches=batches)
    known = dict.fromkeys(case.op_type for case in cases)
    unknown = [node for node in nodes if node not in known]
    if unknown:
        raise click.BadParameter(f"there is no {', '.join(unknown)}; use {', '.join(known)}")
    chosen = [case for case in cases if not nodes or case.op_type in nodes]
    return measure_cases(Gpu(), chosen, Options(samples=samples, folder=""))


if __name__ == "__main__":
    main()
