"""A soak: clients at full load for minutes, and whether all is as before when they are gone."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from export_grok.engines.backend import RowSession
from export_grok.runtime.model import Model, load
from export_grok.runtime.open import open_session
from scripts.soaking.cases import PATIENCE, Case, drawn_cases, said
from scripts.soaking.clients import Client
from scripts.soaking.compare import Answers, was_open
from scripts.soaking.ledger import Ledger
from scripts.soaking.memory import Memory

__all__ = ["LARGEST_GROWTH", "Options", "Soak", "soaked"]

# Bytes a minute. What is kept of each request would be thousands of requests a minute.
LARGEST_GROWTH = 256 << 10
FEWEST_SAMPLES = 60  # to tell memory's growth from
FILES = Path("/proc/self/fd")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much of everything.

    Attributes:
        minutes: that clients keep asking.
        clients: threads.
        batch: rows of the cache.
        pool: requests to choose from, each answered alone before.
        max_waiting: requests that may wait for a row.
        sample_seconds: between two looks at memory.
        seed: of all chance but the threads' own.
    """

    minutes: float
    clients: int = 16
    batch: int = 8
    pool: int = 200
    max_waiting: int = 6
    sample_seconds: float = 5.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What came of it.

    Attributes:
        seconds: under load.
        events: counts of the loop's.
        answers: counts of the clients'.
        figures: other numbers by name.
        memory: bytes of the process's own, sampled.
        faults: what may not be; none is wanted.
    """

    seconds: float
    events: dict[str, int]
    answers: dict[str, int]
    figures: dict[str, float]
    memory: list[int]
    faults: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return dict(vars(self))


def soaked(folder: Path, options: Options, say: Callable[[str], None] = lambda line: None) -> Soak:
    """Load a model by many clients, and return what came of it.

    Args:
        folder: of a bundle with an engine and a tokenizer.
        options: how much.
        say: gets a line whenever something else begins.
    """
    random = Random(options.seed)
    threads = _threads()
    ledger, faults = Ledger(), []
    with load(
        folder, batch=options.batch, max_waiting=options.max_waiting, observers=[ledger]
    ) as model:
        say(f"answering {options.pool} requests alone")
        cases = drawn_cases(model, options.pool, random)
        answers = Answers(model.tokenizer, model.config.eos_token)
        say(f"{options.clients} clients for {options.minutes:g} minutes")
        before, files = dict(ledger.counts), _files()
        began = time.perf_counter()
        with Memory(options.sample_seconds) as memory:
            faults += _clients_ran(model, cases, answers, options, random)
            seconds = time.perf_counter() - began
        events = {name: count - before.get(name, 0) for name, count in ledger.counts.items()}
        faults += _not_as_before(model)
        if not (faults or answers.faults):  # one of them may be that no answer ends
            say("some of the same requests alone again")
            for case in random.sample(cases, min(20, len(cases))):
                _asked_again(model, case, answers)
        if _files() > files:
            faults.append(f"{_files() - files} files more are open")
    faults += [f"request {name} never ended" for name in ledger.open]
    faults += [f"thread {name} is left" for name in sorted(_threads() - threads)]
    if len(memory.bytes) >= FEWEST_SAMPLES and memory.growth > LARGEST_GROWTH:
        faults.append(
            f"memory grows by {memory.growth / 1024:.0f} KiB a minute, more than "
            f"{LARGEST_GROWTH >> 10}"
        )
    say(f"settling {len(answers.parted)} answers that left the ones alone")
    with open_session(model.bundle, batch=1, max_length=model.max_length) as session:
        faults += _not_open(answers, session)
    turns = max(1, events.get("turns", 0))
    return Soak(
        seconds=seconds,
        events=events,
        answers=dict(answers.counts),
        figures={
            "tokens_per_second": events.get("new_tokens", 0) / seconds,
            "requests_per_second": events.get("submitted", 0) / seconds,
            "rows_in_use": events.get("running", 0) / turns,
            "most_waiting": ledger.most_waiting,
            "largest_logprob_difference": answers.largest,
            "memory_first": memory.bytes[len(memory.bytes) // 3],
            "memory_last": memory.bytes[-1],
            "memory_growth": memory.growth,
        },
        memory=memory.bytes,
        faults=[*faults, *ledger.faults, *answers.faults],
    )


def _clients_ran(
    model: Model, cases: list[Case], answers: Answers, options: Options, random: Random
) -> list[str]:
    """Let clients ask until it is time; return what is wrong then."""
    ends = time.monotonic() + 60 * options.minutes
    threads = [
        threading.Thread(
            target=Client(model, cases, answers, Random(random.random()), ends).run,
            name=f"client {number}",
            daemon=True,
        )
        for number in range(options.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()) + 2 * PATIENCE)
    return [f"{thread.name} still waits" for thread in threads if thread.is_alive()]


def _asked_again(model: Model, case: Case, answers: Answers) -> None:
    with said(model, case) as say:
        for turn in case.turns:
            if not answers.take(turn, say(turn).result(PATIENCE)):
                return


def _not_as_before(model: Model) -> list[str]:
    """Return what the load is more than that of a model nobody has asked anything."""
    patience = time.monotonic() + PATIENCE
    while (load := model.current_load()).running or load.waiting:
        if time.monotonic() > patience:
            return [f"nobody asks, and the load is {load}"]
        time.sleep(0.01)
    return [f"nobody asks, and the load is {load}"] if load.cache_tokens else []


def _not_open(answers: Answers, session: RowSession) -> list[str]:
    settled: dict[Any, bool] = {}
    faults = []
    for parted in answers.parted:
        place = (parted.prefix, parted.token, parted.params.seed)
        if place not in settled:
            settled[place] = was_open(parted, session)
        if settled[place]:
            answers.counts["parted where the choice was open"] += 1
        else:
            faults.append(
                f"behind {len(parted.prefix)} tokens, {parted.made} of an answer, came token "
                f"{parted.token}, which is not what comes alone"
            )
    return faults


def _threads() -> set[str]:
    return {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}


def _files() -> int:
    with contextlib.suppress(OSError):
        return len(list(FILES.iterdir()))
    return 0
