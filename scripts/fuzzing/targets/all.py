"""Every target by its name; each is imported when it is asked for."""

import pkgutil
from pathlib import Path

from scripts.fuzzing.target import Target

__all__ = ["TARGETS", "made"]

_HERE = __name__.rpartition(".")[0]
TARGETS = {
    "pickle": "released:PickleTarget",
    "checkpoint": "released:CheckpointTarget",
    "safetensors": "stored:SafetensorsTarget",
    "store": "stored:StoreTarget",
    "import": "stored:ImportTarget",
    "manifest": "bundle_files:ManifestTarget",
    "index": "bundle_files:IndexTarget",
    "hf-index": "foreign:HfTarget",
    "torch": "torch_file:TorchTarget",
    "tokenizer": "texts:TokenizerTarget",
    "tokens": "texts:TokensTarget",
    "requests": "jsonl:RequestsTarget",
    "results": "jsonl:ResultsTarget",
    "graph": "graphs:GraphTarget",
    "graphs": "graphs:GraphsTarget",
}


def made(name: str, folder: Path, bundle: Path | None = None) -> Target:
    """Return a target with its files.

    Args:
        name: of the target.
        folder: for the files; it is there, and empty.
        bundle: whose graphs are taken, by targets that need some; else they build one.
    """
    kind = pkgutil.resolve_name(f"{_HERE}.{TARGETS[name]}")
    target: Target = kind(folder, bundle) if "graph" in name else kind(folder)
    assert target.name == name
    return target
