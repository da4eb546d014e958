"""Take all 64 layers of Grok-1 through every stage, on 770 sparse files.

    python benchmarks/full_model.py DIR [--decode 2]

Writes files of the exact published sizes and headers into DIR (a few MB on disk), runs every stage
as a user would, and prints a line for each with its time and the peak of its memory. Decoding
reads every byte that a token of Grok-1 needs; all are zero, but neither kernels nor system know.
"""

import sys
from pathlib import Path

import click
import numpy as np
from timed import timed

from export_grok.config import GROK_1
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.released_layout import write_released


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--decode", "steps", default=2, show_default=True, help="Tokens to decode.")
def main(folder: Path, steps: int) -> None:
    """Run the stages at 64 layers in FOLDER."""
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    if not checkpoint.exists():
        (checkpoint / RELEASED_FOLDER).mkdir(parents=True)
        for name, arrays in released_files(GROK_1).items():
            write_released(checkpoint / RELEASED_FOLDER / name, arrays, None)
    program = [sys.executable, "-m", "export_grok"]
    timed("index", [*program, "index", str(checkpoint)])
    timed("export", [*program, "export", str(checkpoint), "--out", str(engine)])
    timed("build-engine", [*program, "build-engine", str(engine)])
    timed("build-engine again", [*program, "build-engine", str(checkpoint), "--out", str(engine)])
    timed("inspect", [*program, "inspect", str(engine)])
    if steps:
        tokens, logits = folder / "tokens.npy", folder / "logits.npz"
        np.save(tokens, np.arange(1, 1 + steps)[None])
        command = ["logits", str(engine), "--tokens", str(tokens), "--out", str(logits)]
        timed(f"load, decode {steps}", [*program, *command, "--decode", str(steps)])


if __name__ == "__main__":
    main()
