"""Take all 64 layers of Grok-1 through every stage, on 770 sparse files.

    python benchmarks/full_model.py DIR [--decode 2]

Writes files of the exact published sizes and headers into DIR (a few MB on disk, see stand_in.py),
runs every stage as a user would, and prints a line for each with its time and the peak of its
memory, mapped files included and left out. Decoding reads every byte that a token of Grok-1 needs;
all are zero, but neither kernels nor system know. Import hashes every byte, and packing for ranks
copies it; of zeros neither writes any.
"""

import shutil
import sys
from pathlib import Path

import click
import numpy as np
from stand_in import write_sparse
from timed import timed

from export_grok.config import GROK_1

PROGRAM = [sys.executable, "-m", "export_grok"]
HERE = Path(__file__).resolve().parent


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--decode", "steps", default=2, show_default=True, help="Tokens to decode.")
@click.option("--tp", default=8, show_default=True, help="Ranks to make graphs for too.")
@click.option(
    "--copies/--no-copies", default=True, help="Import all 318 GB, and pack them for ranks."
)
def main(folder: Path, steps: int, tp: int, copies: bool) -> None:
    """Run the stages at 64 layers in FOLDER."""
    checkpoint, engine, store = (folder / name for name in ("checkpoint", "engine", "store"))
    if not checkpoint.exists():
        write_sparse(GROK_1, checkpoint)
    timed("index", [*PROGRAM, "index", str(checkpoint)])
    timed("export", [*PROGRAM, "export", str(checkpoint), "--out", str(engine)])
    timed("build-engine", [*PROGRAM, "build-engine", str(engine)])
    timed("build-engine again", [*PROGRAM, "build-engine", str(checkpoint), "--out", str(engine)])
    ranks = [sys.executable, str(HERE / "rank_graphs.py"), str(engine), "--tp", str(tp)]
    timed(f"graphs of {tp} ranks", ranks)
    timed("inspect", [*PROGRAM, "inspect", str(engine)])
    if copies:
        shutil.rmtree(store, ignore_errors=True)
        timed("import", [*PROGRAM, "import", str(checkpoint), str(store)])
        timed("index of the store", [*PROGRAM, "index", str(store)])
        packed = folder / f"engine_{tp}"
        shutil.rmtree(packed, ignore_errors=True)
        # Forced, as it counts on a disk without holes.
        build = [*PROGRAM, "build-engine", str(checkpoint), "--out", str(packed), "--force"]
        timed(f"build-engine --tp {tp}", [*build, "--tp", str(tp)])
    if steps:
        tokens, logits = folder / "tokens.npy", folder / "logits.npz"
        np.save(tokens, np.arange(1, 1 + steps)[None])
        command = ["logits", str(engine), "--tokens", str(tokens), "--out", str(logits)]
        timed(f"load, decode {steps}", [*PROGRAM, *command, "--decode", str(steps)])


if __name__ == "__main__":
    main()
