"""Findings as folders: the files of an input, to be looked at and given to its target again."""

import dataclasses
import json
from pathlib import Path

from scripts.fuzzing.files import Files, Odd
from scripts.fuzzing.run import Finding
from scripts.fuzzing.target import Target

__all__ = ["keep", "kept_files"]

_TOLD = "finding.json"


def keep(target: Target, finding: Finding, seed: int, folder: Path) -> Path:
    """Write the files of a finding that differ from whole ones; return their folder."""
    place = folder / f"{target.name}-{seed}-{finding.case.number}"
    files, whole = target.files_of(finding.case), target.placed.whole
    odd = {}
    for name, content in files.items():
        if content is whole.get(name):
            continue
        if isinstance(content, Odd):
            odd[name] = dataclasses.astuple(content)
            continue
        path = place / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    place.mkdir(parents=True, exist_ok=True)
    told = {
        "target": target.name,
        "seed": seed,
        "what": finding.what,
        "where": finding.where,
        "case": dataclasses.asdict(finding.case),
        "removed": sorted(whole.keys() - files.keys()),
        "odd": odd,
    }
    (place / _TOLD).write_text(json.dumps(told, indent=1) + "\n")
    return place


def kept_files(place: Path, whole: Files) -> Files:
    """Return the files of a finding that was kept."""
    told = json.loads((place / _TOLD).read_text())
    files = {name: content for name, content in whole.items() if name not in told["removed"]}
    files |= {name: Odd(*odd) for name, odd in told["odd"].items()}
    for path in (place / "files").rglob("*"):
        if path.is_file():
            files[str(path.relative_to(place / "files"))] = path.read_bytes()
    return files
