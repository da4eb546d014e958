"""Write a checkpoint for others in every format, and print what that took.

    python benchmarks/export_weights.py CHECKPOINT DIR

DIR has to be new; each format is removed before the next. A layer of the published size takes
12 GB at the most. The time beside it is that of writing as much without work: `dd` and a flush.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
from timed import timed

from export_grok.files import new_folder

FORMATS = {
    "gguf, int8": ("--to", "gguf"),
    "hf, bfloat16": ("--to", "hf"),
}
PATH = click.Path(path_type=Path)


@click.command()
@click.argument("checkpoint", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--layers", type=int, help="Only the first so many layers.")
def main(checkpoint: Path, folder: Path, layers: int | None) -> None:
    """Export CHECKPOINT into DIR and remove it again."""
    options = [] if layers is None else ["--layers", str(layers)]
    with new_folder(folder):
        for label, format_options in FORMATS.items():
            out = folder / "out"
            program = [sys.executable, "-m", "export_grok", "export-weights", str(checkpoint)]
            timed(label, [*program, "--out", str(out), *format_options, *options])
            written = sum(path.stat().st_size for path in out.iterdir())
            shutil.rmtree(out)
            seconds = _plain_write(folder / "plain", written)
            print(f"{written / 1e9:.2f} GB; written by dd in {seconds:.1f} s", flush=True)
    folder.rmdir()


def _plain_write(path: Path, nbytes: int) -> float:
    blocks = nbytes >> 20
    began = time.perf_counter()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={blocks}", "conv=fsync"],
        check=True,
        capture_output=True,
    )
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


if __name__ == "__main__":
    main()
