"""What the tests of ranks share: a bundle without files, and every process that was started."""

import dataclasses
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from export_grok.artifacts import MANIFEST, Bundle, open_bundle, write_manifest
from export_grok.config import GrokConfig
from export_grok.manifest import Manifest, WeightsPlace
from tests.runtime.ranks.processes import gone

CONFIG = GrokConfig(
    num_layers=2,
    emb_size=16,
    num_q_heads=8,
    num_kv_heads=8,
    key_size=2,
    ffn_size=8,
    vocab_size=24,
    sequence_len=64,
    attn_output_multiplier=1.0,
    embedding_multiplier_scale=1.0,
    output_multiplier_scale=1.0,
    row_parallel_scale_groups=1,
)

BundleFor = Callable[[int], Bundle]


@pytest.fixture
def bundle_for(tmp_path: Path) -> BundleFor:
    """Return the way to a bundle for so many ranks of the toy."""

    def bundle(ranks: int) -> Bundle:
        folder = tmp_path / f"for {ranks} ranks"
        if not (folder / MANIFEST).exists():
            folder.mkdir()
            manifest = Manifest(
                kind="engine",
                backend="ort",
                config=CONFIG,
                dtype="float32",
                weights=WeightsPlace(copied=True, relative="", absolute=""),
                source={},
                versions={},
                files={},
                weight_files={},
                ports={},
                lowering={},
            )
            write_manifest(
                folder, dataclasses.replace(manifest, engine={"tensor_parallel": ranks})
            )
        return open_bundle(folder)

    return bundle


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the processes of all ranks that were started; at the end none may be left."""
    pids: list[int] = []

    class Counted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            pids.append(self.pid)

    monkeypatch.setattr("export_grok.runtime.ranks.worker.subprocess.Popen", Counted)
    yield pids
    assert pids
    assert all(gone(pid) for pid in pids)
