"""A sum over ranks by the runtime's parent, and by gloo of torch.distributed, measured by turns.

    python benchmarks/all_reduce.py [--ranks 2,4] [--rounds 7]

Each rank is a process. A sum is of one token's residual stream of Grok-1 (24 kB), of 8 and of 256
tokens. Printed are medians for one sum; and what it takes to start a group, its imports included.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import IO

import click
import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, open_bundle, write_manifest
from export_grok.config import GROK_1
from export_grok.engines.group import Group
from export_grok.manifest import Manifest, WeightsPlace
from export_grok.runtime.ranks.session import RankedSession

# Tokens whose sums are measured, and how many sums of them in a turn.
TURNS = {1: 400, 8: 200, 256: 20}
WIDTH = GROK_1.emb_size


class SummingRank:
    """A rank that does nothing but sums: as many as the first token says."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def forward(self, tokens: NDArray[np.int64], start: object, last: object) -> None:
        shape = (1, tokens.shape[1], WIDTH)
        self._group.partial(shape)[:] = 1
        for _ in range(int(tokens[0, 0])):
            self._group.all_reduce(shape, "nothing")


def open_summing(bundle: Bundle, group: Group, **_: int) -> SummingRank:
    """Open the rank."""
    return SummingRank(group)


class Gloo:
    """Processes that sum by gloo when they are told so."""

    def __init__(self, ranks: int, folder: Path) -> None:
        meeting = Path(tempfile.mkdtemp(dir=folder)) / "meeting"
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--gloo", f"{rank},{ranks},{meeting}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        self._answers()

    def seconds(self, tokens: int, count: int) -> float:
        """Return the time of one sum."""
        for process in self._ranks:
            _pipe(process.stdin).write(f"{tokens} {count}\n")
            _pipe(process.stdin).flush()
        return max(map(float, self._answers())) / count

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            process.communicate()

    def _answers(self) -> list[str]:
        return [_pipe(process.stdout).readline() for process in self._ranks]


def serve_gloo(place: str) -> None:
    """Be a rank of gloo: a line of tokens and count in, a line of seconds out."""
    import torch
    import torch.distributed as dist

    rank, ranks, meeting = place.split(",", 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(ranks)
    )
    dist.barrier()
    print("ready", flush=True)
    for line in sys.stdin:
        tokens, count = map(int, line.split())
        part = torch.zeros(tokens, WIDTH)
        dist.barrier()
        began = perf_counter()
        for _ in range(count):
            dist.all_reduce(part)
        print(perf_counter() - began, flush=True)
    dist.destroy_process_group()


def parents_seconds(session: RankedSession, tokens: int, count: int) -> float:
    """Return the time of one sum by the parent."""
    told = np.full((1, tokens), count)
    began = perf_counter()
    session.forward(told, np.zeros(1, np.int64), None)
    return (perf_counter() - began) / count


def empty_bundle(folder: Path) -> Bundle:
    """Return a bundle of Grok-1's sizes without any file."""
    manifest = Manifest(
        kind="engine",
        backend="ort",
        config=GROK_1,
        dtype="float32",
        weights=WeightsPlace(copied=True, relative="", absolute=""),
        source={},
        versions={},
        files={},
        weight_files={},
        ports={},
        lowering={},
    )
    write_manifest(folder, manifest)
    return open_bundle(folder)


def compare(ranks: int, rounds: int, folder: Path) -> None:
    """Print the table for so many ranks."""
    bundle = empty_bundle(folder)

    def open_parent() -> RankedSession:
        return RankedSession(
            bundle,
            ranks=ranks,
            batch=1,
            max_length=max(TURNS),
            threads=1,
            opener=f"{Path(__file__).stem}:open_summing",
        )

    starts: dict[str, list[float]] = {"parent": [], "gloo": []}
    for _ in range(3):
        for name, start in (("parent", open_parent), ("gloo", lambda: Gloo(ranks, folder))):
            began = perf_counter()
            group: RankedSession | Gloo = start()  # type: ignore[operator]
            starts[name].append(perf_counter() - began)
            group.close()
    with open_parent() as session:
        gloo = Gloo(ranks, folder)
        ways: dict[str, Callable[[int, int], float]] = {
            "parent": lambda tokens, count: parents_seconds(session, tokens, count),
            "gloo": gloo.seconds,
        }
        for tokens, count in TURNS.items():
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for way in ways.values():
                way(tokens, count)  # memory is there from now on
            for _ in range(rounds):
                for name, way in ways.items():
                    taken[name].append(way(tokens, count))
            _print(ranks, f"{tokens * WIDTH * 4 / 1024:6,.0f} KiB", taken, 1e6, "us")
        gloo.close()
    _print(ranks, "to start  ", starts, 1, "s")


def _print(ranks: int, what: str, taken: dict[str, list[float]], scale: float, unit: str) -> None:
    told = ", ".join(
        f"{name} {statistics.median(times) * scale:9.2f} {unit} "
        f"({min(times) * scale:.2f} to {max(times) * scale:.2f})"
        for name, times in taken.items()
    )
    print(f"{ranks} ranks  {what}  {told}", flush=True)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@click.command()
@click.option("--ranks", default="2,4", show_default=True, metavar="N,...")
@click.option("--rounds", default=7, show_default=True)
@click.option("--gloo", hidden=True)
def main(ranks: str, rounds: int, gloo: str | None) -> None:
    """Compare the sums of ranks."""
    if gloo:
        serve_gloo(gloo)
        return
    folder = Path(tempfile.mkdtemp())
    try:
        for number in map(int, ranks.split(",")):
            compare(number, rounds, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
