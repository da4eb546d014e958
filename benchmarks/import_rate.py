"""Measure how fast `export-grok import` is against `dd`, which copies the same files.

    python benchmarks/import_rate.py DIR [--layers 1] [--rounds 3] [--workers 2]

DIR/checkpoint holds full-size layers of Grok-1 as full_layer.py writes them, and is written if it
is not there: 4.9 GB for each layer, and 3.2 GB of embedding. The same room is needed for a copy.
Both write into DIR, in turns, and flush what they wrote to the disk; the source is dropped from
the system's memory before each. An import hashes all bytes twice: the tensors, and the files.
"""

import dataclasses
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from disk import drop_from_memory
from stages import made_checkpoint, told_in_a_line

from export_grok.config import GROK_1
from export_grok.export.checkpoint import open_weights
from export_grok.export.random_checkpoint import write_random_checkpoint

GOAL = 0.6


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="Of the import.")
def main(folder: Path, layers: int, rounds: int, workers: int | None) -> None:
    """Copy the checkpoint in DIR by dd and by import, in turns."""
    with told_in_a_line():
        config = dataclasses.replace(GROK_1, num_layers=layers)
        checkpoint = made_checkpoint(folder, config, write_random_checkpoint)
        _, index = open_weights(checkpoint, layers=layers)
    files = [checkpoint / file for file in index.files]
    nbytes = sum(index.files.values())
    more = [] if workers is None else ["--workers", str(workers)]
    copies: dict[str, Callable[[Path], int]] = {
        "dd": lambda out: _by_dd(files, out),
        "import": lambda out: _by_import(checkpoint, layers, more, out),
    }
    rates: dict[str, list[float]] = {name: [] for name in copies}
    peak = 0
    for number in range(rounds):
        for name, copy in copies.items():
            out = folder / f"import_rate_{name}"
            shutil.rmtree(out, ignore_errors=True)
            drop_from_memory(files)
            try:
                began = time.perf_counter()
                peak = max(peak, copy(out))
                rates[name].append(nbytes / (time.perf_counter() - began))
            finally:
                shutil.rmtree(out, ignore_errors=True)
            click.echo(f"round {number + 1}  {name:8} {rates[name][-1] / 1e6:7.0f} MB/s")
    middle = {name: statistics.median(found) for name, found in rates.items()}
    ratio = middle["import"] / middle["dd"]
    click.echo(
        f"{nbytes / 1e9:.1f} GB: dd {middle['dd'] / 1e6:.0f} MB/s, import "
        f"{middle['import'] / 1e6:.0f} MB/s (medians), {ratio:.0%} of dd, at least {GOAL:.0%} "
        f"wanted; peak of the import's memory {peak / 1e6:.0f} MB"
    )


def _by_dd(files: Sequence[Path], out: Path) -> int:
    out.mkdir()
    for file in files:
        _run(["dd", f"if={file}", f"of={out / file.name}", "bs=8M", "conv=fsync", "status=none"])
    return 0


def _by_import(checkpoint: Path, layers: int, more: Sequence[str], out: Path) -> int:
    """Return the peak of its memory in bytes, files that are in it counted too."""
    command = [sys.executable, "-m", "export_grok", "import", str(checkpoint), str(out)]
    return _run([*command, "--layers", str(layers), *more])


def _run(command: Sequence[str]) -> int:
    silent = os.open(os.devnull, os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, silent, descriptor) for descriptor in (1, 2)]
    process = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
    os.close(silent)
    _, status, usage = os.wait4(process, 0)
    if status:
        raise click.ClickException(f"{' '.join(command)} failed with status {status}")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
