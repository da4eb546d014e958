"""What `export.check.soundness` has found, in lines for people."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from export_grok.export.check.findings import Finding, Level, counted
from export_grok.export.check.soundness import Soundness
from export_grok.export.faults import MAX_PRINTED_FAULTS

__all__ = ["lines_of", "listed", "verdict"]

_LEVELS: tuple[Level, ...] = ("wrong", "doubtful")


def lines_of(found: Soundness) -> Iterator[str]:
    """Yield what was read and what was found."""
    yield (
        f"{found.path}: {found.kind} of {counted(found.layers, 'layer')}, "
        f"{counted(found.tensors, 'tensor')} in {counted(found.files, 'file')}; "
        f"{found.nbytes:,} bytes read in {found.seconds:.1f} s, "
        f"{found.nbytes / found.seconds / 1e9:.2f} GB/s"
    )
    if found.hashes:
        yield f"sha256 as it must be: {found.hashes:,}"
    elif not any(finding.kind == "hash" for finding in found.findings):
        yield "sha256: none is known to hold the bytes to; values only were checked"
    yield from listed(found.findings)
    if not found.findings:
        yield "all as it must be"


def listed(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield findings, the wrong ones first, up to 20 of each level."""
    for level in _LEVELS:
        lines = [f"  {finding}" for finding in findings if finding.level == level]
        if lines:
            yield f"{level} ({len(lines)}):"
        yield from lines[:MAX_PRINTED_FAULTS]
        if len(lines) > MAX_PRINTED_FAULTS:
            yield f"  ... and {len(lines) - MAX_PRINTED_FAULTS} more; --json has all"


def verdict(path: Path, findings: Sequence[Finding]) -> str:
    """Return that weights are not sound, and what to do."""
    wrong = sum(finding.level == "wrong" for finding in findings)
    return f"{path} is not sound: {wrong} wrong, listed above; get or make these files again"
