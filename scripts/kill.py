"""Kill commands while they write, fill the disk under them, and look at what they leave behind.

    python -m scripts.kill CHECKPOINT [--work build]... [--kills 200] [--every]

A command is killed when it is about to change a file, or has half written what it writes, at
moments drawn by chance or (`--every`) at all of them; after a time drawn by chance; and again and
again. The folder must not load then, or be right to the last byte, and the same command, run
again, must make it so. A full disk must be said in one line besides. The exit code is 1 if
something was wrong.

CHECKPOINT is small, tests/data/tiny for example: all is done some thousand times.
"""

import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import click

from scripts.killing.run import Broken, Trial
from scripts.killing.work import Bundles
from scripts.killing.works import WORKS, keep_traces, made

__all__ = ["main"]

FOLDER = click.Path(path_type=Path)
COUNT = click.IntRange(min=0)


@click.command(context_settings={"show_default": True})
@click.argument("checkpoint", type=FOLDER)
@click.option("--work", "names", type=click.Choice(list(WORKS)), multiple=True, help="[all]")
@click.option("--kills", type=COUNT, default=100, help="Moments of each command to kill it at.")
@click.option("--every", is_flag=True, help="Kill it at all moments, and fill the disk at all.")
@click.option("--timed", type=COUNT, default=20, help="Times to kill it after a time.")
@click.option("--chains", type=COUNT, default=5, help="Times to kill it again and again.")
@click.option("--full", type=COUNT, default=20, help="Moments to fill the disk at.")
@click.option("--seed", type=int, help="Of all chance; another in each run by default.")
@click.option("--traces", type=FOLDER, help="Folder of traces to take and to leave.")
@click.option("--bundle", type=FOLDER, help="That answers requests; the demo's by default.")
@click.option("--json", "json_file", type=FOLDER, help="File for all figures.")
def main(
    checkpoint: Path,
    names: tuple[str, ...],
    kills: int,
    every: bool,
    timed: int,
    chains: int,
    full: int,
    seed: int | None,
    traces: Path | None,
    bundle: Path | None,
    json_file: Path | None,
) -> None:
    """Kill commands while they write, and look at what they leave behind."""
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    told = {}
    with tempfile.TemporaryDirectory(prefix="kill_", dir=_memory()) as folder:
        scratch = Path(folder)
        if any(WORKS[name][0] is Bundles for name in names or WORKS):
            keep_traces(traces or scratch / "traces")
        for name in names or WORKS:
            random = Random(f"{seed} {name}")
            (scratch / name).mkdir()
            work = made(name, checkpoint.resolve(), scratch, bundle and bundle.resolve())
            trial = Trial(work, scratch / name)
            broken = Broken()
            begun = time.monotonic()
            counts = (None, None) if every else (kills, full)
            at = _drawn(trial.moments, counts[0], random)
            at_full = _drawn(trial.room, counts[1], random)
            for number in at:
                trial.killed_at(number, broken)
            for _ in range(timed):
                trial.killed_after(random.uniform(0, 1.1 * trial.seconds), broken)
            for _ in range(chains):
                trial.killed_again_and_again(random, broken)
            for number in at_full:
                trial.full_at(number, broken)
            broken.seconds = time.monotonic() - begun
            click.echo(
                f"{name}: killed at {len(at)} of {trial.moments} moments, {timed} times by time, "
                f"{chains} times again and again; disk full at {len(at_full)} of {trial.room}; "
                f"then {', '.join(f'{count} {what}' for what, count in broken.outcomes.items())}; "
                f"{len(broken.faults)} faults; seed {seed}, {broken.seconds:.0f} s"
            )
            for fault in broken.faults:
                click.echo(f"  {fault}")
            told[name] = {
                "moments": trial.moments,
                "room": trial.room,
                "kills": len(at) + timed + chains,
                "full": len(at_full),
                "outcomes": broken.outcomes,
                "faults": broken.faults,
                "seconds": round(broken.seconds, 2),
            }
    if json_file:
        json_file.write_text(json.dumps({"seed": seed, "works": told}, indent=1) + "\n")
    sys.exit(any(one["faults"] for one in told.values()))


def _drawn(count: int, wanted: int | None, random: Random) -> list[int]:
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted(random.sample(range(count), wanted))


def _memory() -> Path | None:
    """Return a folder in memory, if there is one: nothing there waits for a disk."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else None


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
