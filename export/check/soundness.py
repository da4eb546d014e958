"""Whether weights are sound: every byte is read once, and all that is wrong is told.

Bytes are held to the hashes that are known of them, values to what a model can hold.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

from export_grok.export.check.file import FileResult, Signature, check_file
from export_grok.export.check.findings import Finding, Level
from export_grok.export.check.plan import CheckPlan

__all__ = ["Soundness", "soundness_of"]

# So many of the matrices that are equal to one are named; all are counted.
MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Soundness:
    """What was read, and what is wrong with it.

    Attributes:
        path: of the folder.
        kind: what it is, in words.
        layers: of the model, as far as they were checked.
        files: how many were read.
        tensors: how many these hold.
        nbytes: that were read.
        hashes: how many were compared and right.
        seconds: that reading took.
        findings: what is wrong, or doubtful.
    """

    path: Path
    kind: str
    layers: int
    files: int
    tensors: int
    nbytes: int
    hashes: int
    seconds: float
    findings: tuple[Finding, ...]

    def at(self, level: Level) -> list[Finding]:
        """Return the findings of a level."""
        return [finding for finding in self.findings if finding.level == level]

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong. Something may be doubtful."""
        return not self.at("wrong")

    def to_dict(self) -> dict[str, object]:
        """Return all of it as JSON values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "sound": self.sound,
            "layers": self.layers,
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "hashes": self.hashes,
            "seconds": self.seconds,
            "bytes_per_second": self.nbytes / self.seconds,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def soundness_of(
    plan: CheckPlan, *, workers: int = 1, progress: Callable[[int], None] = lambda done: None
) -> Soundness:
    """Read all files of a plan and return what is wrong with them.

    Each thread holds a block of 8 MiB of the file that it reads, and what is computed of it.

    Args:
        plan: which files, and what is known of them.
        workers: files that are read at the same time.
        progress: takes how many bytes were read since its last call, from any thread.
    """
    began = time.perf_counter()
    results = _read_all(plan, workers, progress)
    findings = [finding for result in results for finding in result.findings]
    signatures = [signature for result in results for signature in result.signatures]
    return Soundness(
        path=plan.path,
        kind=plan.kind,
        layers=plan.config.num_layers,
        files=len(plan.files),
        tensors=sum(len(file.weights) for file in plan.files),
        nbytes=sum(result.nbytes for result in results),
        hashes=sum(result.hashes for result in results),
        seconds=time.perf_counter() - began,
        findings=(*plan.findings, *findings, *_equal(signatures)),
    )


def _read_all(plan: CheckPlan, workers: int, progress: Callable[[int], None]) -> list[FileResult]:
    stop = Event()
    check = partial(check_file, progress=progress, stop=stop)
    # The longest first: at the end no thread is left alone with it.
    order = sorted(range(len(plan.files)), key=lambda number: -plan.files[number].nbytes)
    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = {number: pool.submit(check, plan.files[number]) for number in order}
            return [futures[number].result() for number in sorted(futures)]
        except BaseException:  # Ctrl-C: nobody waits for the rest
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _equal(signatures: Sequence[Signature]) -> Iterator[Finding]:
    """Yield which matrices are equal: trained ones never are, copied ones of a conversion may be.

    A matrix is compared with those of all layers and of all kinds.
    """
    same = defaultdict(list)
    for signature in signatures:
        same[signature.content].append(signature)
    for first, *others in same.values():
        if others:
            named = ", ".join(map(_named, others[:MAX_NAMED]))
            more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
            yield Finding(
                level="wrong",
                kind="equal",
                file=first.file,
                tensor=first.tensor,
                text=f"{f'{[*first.index]} ' if first.index else ''}is the same byte for byte as "
                f"{named}{more}",
                count=1 + len(others),
                index=first.index,
            )


def _named(signature: Signature) -> str:
    index = f" {[*signature.index]}" if signature.index else ""
    return f"{signature.tensor}{index}"
