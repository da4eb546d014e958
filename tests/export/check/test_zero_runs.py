"""Every long run of zeros is found where it is, however the bytes are cut, and no other."""

import re

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from export_grok.export.check.zero_runs import HOLE_BYTES, ZeroRun, ZeroRuns

# Around the length that counts, and around the distance of what is looked at first.
LENGTHS = st.one_of(
    st.integers(HOLE_BYTES - 20, HOLE_BYTES + 20),
    st.integers(0, 20),
    st.integers(4090, 4110),
    st.integers(0, 3 * HOLE_BYTES),
)


@given(
    offset=st.integers(0, 5000),
    parts=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 200_000), min_size=1, max_size=5),
    zeros=st.sampled_from([0.0, 0.03, 0.9]),
    seed=st.integers(0, 100),
)
@example(offset=0, parts=[(0, HOLE_BYTES)], cuts=[HOLE_BYTES], zeros=0.0, seed=0)
@example(offset=3, parts=[(5, HOLE_BYTES), (9, HOLE_BYTES)], cuts=[10], zeros=0.0, seed=0)
@settings(max_examples=60, deadline=None)
def test_runs_are_those_of_a_plain_search(
    offset: int,
    parts: list[tuple[int, int]],
    cuts: list[int],
    zeros: float,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    pieces = []
    for length, run in parts:
        values = random.integers(1, 256, length, dtype=np.uint8)
        values[random.random(length, np.float32) < zeros] = 0
        pieces += [values, np.zeros(run, np.uint8)]
    data = np.concatenate(pieces)

    runs = ZeroRuns()
    at = 0
    while at < len(data):
        # One buffer again and again, as files are read.
        block = data[at : at + max(cuts[at % len(cuts)], len(data) // 100)].copy()
        assert runs.feed(offset + at, block) == bool(block.any())
        at += len(block)
    runs.end(offset + len(data))

    assert runs.found == [
        ZeroRun(offset + found.start(), offset + found.end())
        for found in re.finditer(rb"\0+", data.tobytes())
        if found.end() - found.start() >= HOLE_BYTES
    ]
