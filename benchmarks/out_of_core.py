"""Decode with a model that is larger than memory, and hold it to what the disk gives.

    python benchmarks/out_of_core.py DIR --memory-share 0.25 --report docs/performance.md

DIR holds full-size layers of Grok-1 as full_layer.py writes them, and is filled so if it is empty:
4.9 GB for each layer, 3.2 GB of embedding and 0.8 GB for the head. The weights that decoding can
touch are those of the layers and the head, in int8. The process that decodes runs in a control
group that has memory for a share of them only; they are dropped from memory first, so that what it
reads counts there. Needed are Linux, root, the native kernels and

    pip install -c constraints.txt -e ".[export,onnxruntime,plot]"
"""

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from disk import disk_rate, drop_from_memory
from memory_group import memory_group
from out_of_core_report import table, write_report
from out_of_core_result import Result, Run, Token
from sections import check_report
from stages import built_engine, made_checkpoint, told_in_a_line

from export_grok.artifacts import HEAD_WEIGHTS, Bundle, open_bundle
from export_grok.config import GROK_1
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.plugins.kernels import native_kernels
from export_grok.runtime.bench.traffic import step_traffic

EMBEDDING = "embedding.weight"
FILE = click.Path(path_type=Path)


@click.command()
@click.argument("folder", metavar="DIR", type=FILE)
@click.option(
    "--memory-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.25,
    show_default=True,
    help="Memory for so much of the weights.",
)
@click.option("--tokens", type=click.IntRange(min=1), default=6, show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--report", "report_file", type=FILE, help="Markdown file to write a section of.")
def main(
    folder: Path, memory_share: float, tokens: int, layers: int, report_file: Path | None
) -> None:
    """Decode with the layers in DIR, with and without a limit of memory."""
    # Ended by any signal, it takes the decoding process and its control group along.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with told_in_a_line():
        if report_file:
            check_report(report_file)
        kernels = native_kernels()
        if kernels.library is None:
            raise click.ClickException(
                "this needs the native kernels, which read weights where they lie: "
                f"{kernels.reason}"
            )
        with memory_group(1 << 30):
            pass  # told before minutes of work: there can be one here
        config = dataclasses.replace(GROK_1, num_layers=layers)
        checkpoint = made_checkpoint(folder, config, write_random_checkpoint)
        bundle = open_bundle(built_engine(checkpoint, layers), kind="engine")
        result = _measured(bundle, memory_share, tokens)
        click.echo(table(result))
        if report_file:
            write_report(report_file, result)


def _measured(bundle: Bundle, share: float, tokens: int) -> Result:
    index, manifest = bundle.index(), bundle.manifest
    head = bundle.folder / HEAD_WEIGHTS
    files = [head, *(bundle.weights_root / name for name in manifest.weight_files)]
    touchable = sum(weight.nbytes for weight in index if weight.name != EMBEDDING)
    touchable += head.stat().st_size
    limit = int(share * touchable)
    # Decoding reads a row of it for each token: the rest is there for the disk to be measured.
    unused = bundle.weights_root / index[EMBEDDING].file

    click.echo("measuring the disk", err=True)
    before = disk_rate(unused, half=0)
    stayed = drop_from_memory(files)
    click.echo(f"decoding with {limit / 1e9:.2f} GB of memory", err=True)
    with memory_group(limit) as group:
        limited = _run(group.command(_command(bundle, tokens)))
        most_used = group.most_used()
    click.echo("measuring the disk again", err=True)
    after = disk_rate(unused, half=1)
    click.echo("decoding without that limit", err=True)
    free = _run([*_command(bundle, tokens), "--warm"])
    attended = 1 + (tokens + 1) / 2
    return Result(
        layers=manifest.config.num_layers,
        touchable=touchable,
        limit=limit,
        step_bytes=step_traffic(
            manifest.config, manifest.dtype, manifest.head, batch=1, attended=attended
        ).total,
        stayed=stayed,
        disk=(before, after),
        limited=limited,
        free=free,
        most_used=most_used,
    )


def _command(bundle: Bundle, tokens: int) -> list[str]:
    program = Path(__file__).with_name("decode_steps.py")
    return [sys.executable, str(program), str(bundle.folder), "--tokens", str(tokens)]


def _run(command: Sequence[str]) -> Run:
    """Return what the decoding process says; each token is told as it comes.

    Raises:
        ClickException: it failed.
    """
    tokens, rest = [], {}
    # In a process group of its own Ctrl-C does not reach it: it is ended here, and says nothing.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as child:
        try:
            for line in child.stdout or ():
                found = json.loads(line)
                if "seconds" in found:
                    tokens.append(Token(**found))
                    click.echo(f"  {tokens[-1]}", err=True)
                else:
                    rest = found
        except BaseException:
            child.kill()
            raise
    if child.returncode == -signal.SIGKILL:
        raise click.ClickException(
            "the decoding process was killed: its own memory does not fit the limit; give a "
            "larger --memory-share"
        )
    if child.returncode:
        raise click.ClickException(f"the decoding process failed with status {child.returncode}")
    return Run(tokens=tuple(tokens), **rest)


if __name__ == "__main__":
    main()
