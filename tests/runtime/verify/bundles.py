"""Bundles of the fixture models without graphs, which take no time: what a reference looks at."""

import shutil
from pathlib import Path
from typing import Any

from export_grok.artifacts import TOKENIZER, WEIGHT_INDEX, Bundle, record_of, write_manifest
from export_grok.manifest import Manifest, WeightsPlace
from tests.conftest import load_golden

__all__ = ["bundle_with"]


def bundle_with(name: str, folder: Path, tokenizer: Path | None = None, **fields: Any) -> Bundle:
    """Write the bundle of a fixture model, so that it opens, and return it.

    Args:
        name: of the fixture.
        folder: to write to.
        tokenizer: file of one, if the bundle has one.
        fields: of the manifest, in place of those of a float32 engine for ONNX Runtime.
    """
    golden = load_golden(name)
    folder.mkdir(parents=True)
    golden.index.write(folder / WEIGHT_INDEX)
    files = [WEIGHT_INDEX]
    if tokenizer is not None:
        shutil.copy(tokenizer, folder / TOKENIZER)
        files.append(TOKENIZER)
    values: dict[str, Any] = {
        "kind": "engine",
        "backend": "ort",
        "config": golden.config,
        "dtype": "float32",
        "weights": WeightsPlace(copied=False, relative="", absolute=str(golden.folder)),
        "source": {"ckpt-0/tensor00000_000": "aa", "ckpt-0/tensor00001_000": "bb"},
        "versions": {},
        "files": {file: record_of(folder / file) for file in files},
        "weight_files": {},
        "ports": {},
        "lowering": {},
    }
    manifest = Manifest(**(values | fields))
    write_manifest(folder, manifest)
    return Bundle(folder=folder, weights_root=golden.folder, manifest=manifest)
