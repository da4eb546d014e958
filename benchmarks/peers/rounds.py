"""The rounds of a comparison: each peer in a process of its own, the read ceiling between them."""

import datetime
import json
import os
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from peers import Peer
from reference import relative_error
from results import Results

from export_grok.runtime.bench.ceiling import Ceiling
from export_grok.weights import WeightIndex

__all__ = ["Rounds"]

READINGS = 10
ERROR_LINES = 15


class Rounds:
    """Measures peers.

    Args:
        folder: of the comparison; gets `logits` and `logs`.
        index: of the weights, which the ceiling is measured on.
        reference: right logits of the prompt, [S, V].
        tokens: to decode.
        threads: of each peer, and of the ceiling.
        pythons: interpreter of each peer, by its name.
    """

    def __init__(
        self,
        folder: Path,
        index: WeightIndex,
        reference: NDArray[np.float64],
        tokens: int,
        threads: int,
        pythons: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._index = index
        self._reference = reference
        self._tokens = tokens
        self._threads = threads
        self._pythons = pythons

    def run(self, peers: Sequence[Peer], rounds: int, results: Results) -> None:
        """Add what is missing of so many rounds to the results.

        Raises:
            ClickException: a peer failed.
        """
        missing = [
            (number, peer)
            for number in range(rounds)
            for peer in _rotated(peers, number)
            if not results.has(peer.name, number)
        ]
        if not missing:
            return
        ceiling = Ceiling(self._index, self._threads)
        before = _rate(ceiling)
        for number, peer in missing:
            click.echo(f"round {number + 1} of {rounds}: {peer.name}", err=True)
            row = self._measured(peer)
            after = _rate(ceiling)
            results.add(peer.name, number, row | {"ceiling_gb_s": (before + after) / 2})
            before = after

    def _measured(self, peer: Peer) -> dict[str, Any]:
        logits = self._folder / "logits" / f"{peer.name}.npy"
        log = self._folder / "logs" / f"{peer.name}.txt"
        for path in (logits, log):
            path.parent.mkdir(exist_ok=True)
        options = ["--threads", self._threads, "--tokens", self._tokens, "--logits", logits]
        command = peer.command(self._folder, self._pythons[peer.name], *map(str, options))
        row = _run(command, peer.environment, log)
        # The prompt's end after prefill, then each of its tokens fed by itself.
        expected = [self._reference[-1], *self._reference]
        row["errors"] = [
            relative_error(*pair) for pair in zip(np.load(logits), expected, strict=True)
        ]
        row["at"] = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        return row


def _rotated(peers: Sequence[Peer], number: int) -> list[Peer]:
    """Return the peers in the order of a round: each round begins with the next one."""
    first = number % len(peers) if peers else 0
    return [*peers[first:], *peers[:first]]


def _rate(ceiling: Ceiling) -> float:
    """Return what this machine reads now, in GB/s."""
    return float(np.median([ceiling.reading().rate for _ in range(READINGS)])) / 1e9


def _run(command: Sequence[str], environment: dict[str, str], log: Path) -> dict[str, Any]:
    """Run a peer; return what it printed, and `others`: the cores that other programs took.

    Args:
        command: of the peer.
        environment: variables to set for it.
        log: gets what it says on stderr.

    Raises:
        ClickException: it failed.
    """
    busy, own, began = _busy_seconds(), _child_seconds(), time.perf_counter()
    with log.open("wb") as errors:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            check=False,
        )
    seconds = time.perf_counter() - began
    others = (_busy_seconds() - busy) - (_child_seconds() - own)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-ERROR_LINES:])
        raise click.ClickException(f"{' '.join(command)} failed ({done.returncode}):\n{tail}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"others": max(0.0, others / seconds)}


def _busy_seconds() -> float:
    """Return how long all cores were busy, or taken from this machine, until now."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
