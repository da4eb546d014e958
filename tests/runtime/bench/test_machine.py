"""The ceiling is read by all threads from the bundle's matrices; the system is asked rightly."""

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_grok.runtime.bench import ceiling
from export_grok.runtime.bench import machine as bench_machine
from export_grok.runtime.bench.ceiling import Ceiling, Reading
from export_grok.runtime.bench.machine import PeakMemory, cache_bytes, cores
from export_grok.runtime.ranks.worker import PROGRAM
from tests.conftest import Golden, load_golden

Read = Callable[[Any], None]


def by(monkeypatch: pytest.MonkeyPatch, read: Read) -> None:
    """Let the ceiling read by `read` in place of its own ways."""
    monkeypatch.setattr(ceiling, "read_streams", read)
    monkeypatch.setattr(ceiling, "_sum", read)
    monkeypatch.setattr(ceiling, "SECONDS", 0.02)


def address(chunk: Any) -> tuple[int, int]:
    return chunk.ctypes.data, chunk.nbytes


def test_making_it_reads_every_matrix_and_the_embedding_once(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[bytes] = []
    by(monkeypatch, lambda chunk: chunks.append(chunk.tobytes()))
    monkeypatch.setattr(ceiling, "CHUNK", 5000)
    Ceiling(golden.index, 2)
    matrices = [
        weight
        for weight in golden.index
        if weight.name.endswith(".weight") and "router" not in weight.name
    ]
    assert sum(map(len, chunks)) == sum(weight.nbytes for weight in matrices)
    assert max(map(len, chunks)) == 5000
    stored = b"".join(
        (golden.index.root / weight.file).read_bytes()[weight.offset :][: weight.nbytes]
        for weight in matrices
    )
    assert Counter(b"".join(chunks)) == Counter(stored)


def test_of_more_than_the_window_evenly_spread_chunks_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = load_golden("tiny").index
    every: list[tuple[int, int]] = []
    monkeypatch.setattr(ceiling, "CHUNK", 5000)
    by(monkeypatch, lambda chunk: every.append(address(chunk)))
    Ceiling(index, 1)
    total = sum(count for _, count in every)
    monkeypatch.setattr(ceiling, "WINDOW", total // 3 + 1)
    some: list[int] = []
    by(monkeypatch, lambda chunk: some.append(chunk.nbytes))
    Ceiling(index, 1)
    assert some == [count for _, count in every[::3]]


@pytest.mark.parametrize("threads", [1, 3])
def test_all_threads_take_the_next_chunk_and_their_bytes_are_counted(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()
    taken: list[tuple[str, tuple[int, int]]] = []

    def read(chunk: Any) -> None:
        with lock:
            taken.append((threading.current_thread().name, address(chunk)))
        time.sleep(0.001)

    monkeypatch.setattr(ceiling, "CHUNK", 5000)
    by(monkeypatch, read)
    made = Ceiling(load_golden("tiny").index, threads)
    order = [place for _, place in taken]
    taken.clear()
    reading = made.reading()
    assert len({name for name, _ in taken}) == threads
    assert reading.bytes == sum(count for _, (_, count) in taken)
    assert reading.seconds >= 0.02
    wanted = Counter(order[number % len(order)] for number in range(len(taken)))
    assert Counter(place for _, place in taken) == wanted


def test_a_slow_thread_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, others, waited = threading.Lock(), threading.Event(), []
    taken = 0

    def read(chunk: Any) -> None:
        nonlocal taken
        with lock:
            taken += 1
            number = taken
        if number == 1:
            waited.append(others.wait(30))
        elif number == 5:
            others.set()

    by(monkeypatch, lambda chunk: read(chunk) if made else None)
    made: list[Ceiling] = []
    made.append(Ceiling(load_golden("tiny").index, 2))
    monkeypatch.setattr(ceiling, "SECONDS", 0.1)
    made[0].reading()
    assert waited == [True]


def test_without_native_kernels_numpy_reads_and_the_method_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EXPORT_GROK_KERNELS", "builtin")
    made = Ceiling(load_golden("tiny8").index, 2)  # its bytes are not aligned
    assert made.method.startswith("numpy's sum")
    assert made.reading().rate > 0


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_numpy_reads_any_part_of_memory(first: int, count: int) -> None:
    ceiling._sum(np.ones(1024, np.uint8)[first : first + count])


def test_a_rate_is_bytes_by_seconds() -> None:
    reading = Reading(bytes=30, seconds=2.0, cpu_seconds=3.0)
    assert (reading.rate, reading.busy) == (15.0, 1.5)


# What the system says.


def test_peaks_are_those_of_the_status_and_none_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(bench_machine, "STATUS", status)
    monkeypatch.setattr(bench_machine, "INTERVAL", 60.0)
    with PeakMemory() as memory:
        pass
    assert (memory.private, memory.mapped) == (None, None)
    status.write_text("Name:\tpython\nRssAnon:\t    40 kB\nRssFile:\t    9 kB\nThreads:\t2\n")
    with PeakMemory() as memory:
        status.write_text("RssAnon:\t    30 kB\nRssFile:\t    70 kB\n")
    assert (memory.private, memory.mapped) == (40 << 10, 70 << 10)


def test_memory_is_looked_at_while_the_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(bench_machine, "STATUS", status)
    monkeypatch.setattr(bench_machine, "INTERVAL", 0.001)
    with PeakMemory() as memory:
        status.write_text("RssAnon:\t    90 kB\n")
        while memory.private is None:
            time.sleep(0.001)
        status.write_text("RssAnon:\t    10 kB\n")
    assert memory.private == 90 << 10


def test_threads_of_one_core_and_caches_that_are_shared_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_machine, "CPUS", tmp_path)
    monkeypatch.setattr(bench_machine, "_cpus", lambda: [0, 1, 2, 3])
    assert (cores(), cache_bytes()) == (4, None)  # a system that does not say
    for cpu in range(4):
        siblings = tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        siblings.parent.mkdir(parents=True)
        siblings.write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
        for level, size, shared in (
            (1, "32K", str(cpu)),
            (3, "1024K", "0-1" if cpu < 2 else "2-3"),
        ):
            cache = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            cache.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (cache / name).write_text(f"{text}\n")
    assert (cores(), cache_bytes()) == (2, 2 << 20)


@pytest.mark.parametrize("name", [PROGRAM, "another"])
def test_what_ranks_take_counts_as_the_engine_s_and_what_others_take_does_not(name: str) -> None:
    hungry = (
        "import sys, time; held = b'x' * (64 << 20); print(len(held), flush=True); time.sleep(60)"
    )
    with PeakMemory() as alone:
        pass
    command = [sys.executable, "-c", hungry, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        counted = process.pid in bench_machine._ranks()
        with PeakMemory() as both:
            pass
        together, own = bench_machine.process_time(), time.process_time()
        process.kill()
    assert alone.private is not None
    assert both.private is not None
    assert counted == (name == PROGRAM)
    assert (together > own) == counted
    assert (both.private - alone.private > 32 << 20) == counted
