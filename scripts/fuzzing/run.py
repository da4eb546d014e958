"""Give a target one input after the other, in a process that may die of it."""

import json
import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from export_grok.errors import ExportGrokError
from scripts.fuzzing.place import place_in
from scripts.fuzzing.target import Case, Target
from scripts.fuzzing.watch import Forbidden, Watch

__all__ = ["Finding", "Findings", "fuzzed", "reduced"]

# What a process may take beyond what it has, and how long an input may take, before it is ended.
MOST_BYTES = 1 << 30
MOST_SECONDS = 10.0
HUNG = f"took more than {MOST_SECONDS:g} s"
MOST_HUNG = 3
OURS = 99  # how a process ends if the fuzzer failed in it
# Inputs that one process takes: what one of them left behind it does not change all others.
STRETCH = 500


@dataclass(frozen=True)
class Finding:
    """An input that made a reader do what none may.

    Attributes:
        case: the input.
        what: it did.
        where: in the program; the same for what is most likely the same mistake.
    """

    case: Case
    what: str
    where: str


@dataclass
class Findings:
    """What came of a run.

    Attributes:
        inputs: that were given.
        outcomes: how often the readers said what: names of errors, or that they read it.
        found: the first finding of each place.
        repeated: how many more there were of those.
        seconds: that it took.
    """

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    found: list[Finding] = field(default_factory=list)
    repeated: int = 0
    seconds: float = 0.0

    def add(self, finding: Finding) -> None:
        """Keep a finding if it is the first of its place."""
        if any(finding.where == other.where for other in self.found):
            self.repeated += 1
        else:
            self.found.append(finding)


def fuzzed(
    target: Target, seed: int, *, inputs: int | None = None, seconds: float | None = None
) -> Findings:
    """Return what comes of so many inputs, or of all that go into so many seconds.

    The input with no edits, the whole files, comes first: it must be read.
    """
    begun = time.monotonic()
    findings = Findings()
    _take(target, [Case(0, ())], findings)
    if findings.found:
        findings.seconds = time.monotonic() - begun
        return findings
    numbers = iter(range(1, 1 << 62) if inputs is None else range(1, inputs + 1))
    while seconds is None or time.monotonic() - begun < seconds:
        cases = [Case.of(seed, number) for number in islice(numbers, STRETCH)]
        if not cases:
            break
        _take(target, cases, findings)
        if findings.outcomes[HUNG] > MOST_HUNG:
            break
    findings.found = [reduced(target, finding) for finding in findings.found]
    findings.seconds = time.monotonic() - begun
    return findings


def reduced(target: Target, finding: Finding) -> Finding:
    """Return the same finding without the edits that it does not need."""
    place = 0
    while place < len(finding.case.edits):
        edits = finding.case.edits
        fewer = Case(finding.case.number, edits[:place] + edits[place + 1 :])
        again = Findings()
        _take(target, [fewer], again)
        if again.found and again.found[0].where == finding.where:
            finding = again.found[0]
        else:
            place += 1
    return finding


def _take(target: Target, cases: Sequence[Case], findings: Findings) -> None:
    """Give the inputs to processes, a new one after each that died."""
    left = list(cases)
    while left:
        done, death = _in_child(target, left, findings)
        if death is not None:
            findings.add(Finding(left[done], death, death))
            findings.outcomes[death] += 1
            done += 1
            target.placed.renew()
        findings.inputs += done
        del left[:done]
        if findings.outcomes[HUNG] > MOST_HUNG:
            return  # all time would go to more of them


def _in_child(target: Target, cases: Sequence[Case], findings: Findings) -> tuple[int, str | None]:
    """Return how many inputs a process was done with, and of what it died."""
    progress = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            _child(target, cases, progress, writer)
        except BaseException:
            traceback.print_exc()
            os._exit(OURS)
        os._exit(0)
    os.close(writer)
    said, hung = _listen(reader, progress, child)
    _, status = os.waitpid(child, 0)
    for line in said.splitlines():
        kind, *rest = json.loads(line)
        if kind == "counts":
            findings.outcomes.update(rest[0])
        else:
            number, what, where = rest
            findings.add(Finding(cases[number], what, where))
    done = struct.unpack("q", progress[:])[0]
    code = os.waitstatus_to_exitcode(status)
    if code == OURS:
        raise RuntimeError(f"the fuzzer itself failed at {cases[min(done, len(cases) - 1)]}")
    if hung:
        return done, HUNG
    if code < 0:
        return done, f"died of {signal.Signals(-code).name}"
    return done, "ended with the inputs not done" if done < len(cases) else None


def _listen(reader: int, progress: mmap.mmap, child: int) -> tuple[bytes, bool]:
    """Return all that a process says, and whether it had to be ended because nothing happened."""
    said, before, since = b"", b"", time.monotonic()
    while True:
        ready, _, _ = select.select([reader], [], [], min(0.5, MOST_SECONDS))
        if ready:
            data = os.read(reader, 1 << 16)
            if not data:
                break
            said += data
        if progress[:] != before:
            before, since = progress[:], time.monotonic()
        elif time.monotonic() - since > MOST_SECONDS:
            os.kill(child, signal.SIGKILL)
            os.close(reader)
            return b"".join(said.rpartition(b"\n")[:1]), True
    os.close(reader)
    return said, False


def _child(target: Target, cases: Iterable[Case], progress: mmap.mmap, writer: int) -> None:
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    most = pages * mmap.PAGESIZE + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch = Watch(target.folder, target.beside, spare=target.spare)
    counts: Counter[str] = Counter()
    for number, case in enumerate(cases):
        target.placed.place(target.files_of(case))
        outcome, fault = _one(target, watch)
        counts[outcome] += 1
        if fault is not None:
            os.write(writer, json.dumps(["finding", number, *fault]).encode() + b"\n")
        progress[:] = struct.pack("q", number + 1)
    target.placed.place(target.placed.whole)
    os.write(writer, json.dumps(["counts", counts]).encode() + b"\n")


def _one(target: Target, watch: Watch) -> tuple[str, tuple[str, str] | None]:
    """Return what a reader made of the files in the folder, and what was wrong with that."""
    fault: tuple[str, str] | None = None
    try:
        try:
            with watch.on():
                said = target.read()
            outcome = "read"
        except ExportGrokError as error:
            outcome = type(error).__name__
            assert target.told(error), f"this names no file: {error}"
        else:
            target.hold(said)
        target.leave()
    except (Exception, Forbidden, SystemExit) as error:
        outcome = type(error).__name__
        fault = f"{outcome}: {error}"[:500], f"{outcome} at {_place_of(error)}"
    # What is refused too much memory looks for it in other places: that is no finding more.
    if watch.faults and outcome != "MemoryError":
        fault = watch.faults[0]
    return outcome, fault


def _place_of(error: BaseException) -> str:
    return place_in(traceback.extract_tb(error.__traceback__))
