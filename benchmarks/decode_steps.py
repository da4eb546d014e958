"""Decode random tokens one by one and print a line of JSON for each: what it took from the disk.

    python benchmarks/decode_steps.py ENGINE --tokens 6 [--warm]

The last line is the peak of the process's own memory. A first token that is not counted loads what
is loaded late. With --warm every token is decoded twice, and the second time counts: what it reads
is in memory then, if it fits.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from export_grok.artifacts import open_bundle
from export_grok.engines.backend import open_session
from export_grok.runtime.bench.machine import PeakMemory


def main() -> None:
    """Decode as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--warm", action="store_true")
    given = parser.parse_args()

    with PeakMemory() as memory:
        bundle = open_bundle(given.engine, kind="engine")
        session = open_session(bundle, batch=1, max_length=given.tokens + 1)
        vocabulary = bundle.config.vocab_size
        tokens = np.random.default_rng(0).integers(0, vocabulary, given.tokens + 1).tolist()

        def step(place: int) -> None:
            token = np.full((1, 1), tokens[place], np.int64)
            session.forward(token, np.full(1, place, np.int64), np.zeros(1, np.int64))

        step(0)
        places = range(1, given.tokens + 1)
        if given.warm:
            for place in places:
                step(place)
        for place in places:
            read, began = _bytes_from_disk(), time.perf_counter()
            step(place)
            seconds = time.perf_counter() - began
            read = _bytes_from_disk() - read
            print(json.dumps({"seconds": seconds, "bytes": read}), flush=True)
    print(json.dumps({"private": memory.private}))


def _bytes_from_disk() -> int:
    """Return what this process had the disk read until now, for mapped files too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


if __name__ == "__main__":
    main()
