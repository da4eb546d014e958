"""Bundles of the fixture models and of the demo, each built once a run.

A module of tests that needs them imports the fixture: `from tests.bundles import bundle_of`.
"""

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from export_grok.artifacts import Bundle, graph_file
from export_grok.config import Dtype, EngineOptions, GrokConfig, HeadDtype
from export_grok.engines.pipeline import engine_from_source
from export_grok.export import graph_folder
from export_grok.export.demo import write_demo_checkpoint
from export_grok.export.trace import template_from_config
from tests.conftest import DATA

if TYPE_CHECKING:
    import onnx_ir as ir

    from export_grok.export.contract import GraphKind

__all__ = [
    "BundleOf",
    "bundle_of",
    "checkpoint_copy",
    "graphs_changed",
    "hashes",
    "traced_once",
]

BundleOf = Callable[[str], Bundle]

# Head size 4 of deep13 has no attention kernel: there the function body runs.
WITH_FUNCTIONS = {"deep13"}

_built: dict[str, Bundle] = {}


_traced = functools.cache(template_from_config)


def traced(
    kind: "GraphKind",
    config: GrokConfig,
    dtype: Dtype,
    head: HeadDtype = "float32",
    tensor_parallel: int = 1,
) -> "ir.Model":
    """Return the template of a graph; the stages clone it before they change it."""
    if kind in ("embedding", "layer"):  # the same with any head, see tests/export/test_head.py
        head = "float32"
    return _traced(kind, config, dtype, head, tensor_parallel)


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all builds of one config share their traces, which are most of a build's time."""
    monkeypatch.setattr(graph_folder, "template_from_config", traced)
    monkeypatch.setattr("export_grok.export.trace.template_from_config", traced)


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BundleOf]:
    """Return the way to a shared bundle: of a fixture model, or "demo". Leave it as it is."""

    def bundle(name: str) -> Bundle:
        if name not in _built:
            folder = tmp_path_factory.mktemp(f"bundle_{name}")
            source = DATA / name
            if name == "demo":
                source = folder / "checkpoint"
                write_demo_checkpoint(source)
            _built[name] = engine_from_source(
                source,
                folder / "bundle",
                backend="ort",
                engine=EngineOptions(allow_functions=name in WITH_FUNCTIONS),
            )
        return _built[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_folder, "template_from_config", traced)
        yield bundle


def checkpoint_copy(name: str, folder: Path) -> Path:
    """Copy the checkpoint of a fixture model to `folder` and return it."""
    shutil.copytree(DATA / name, folder, ignore=shutil.ignore_patterns("goldens.npz", "README*"))
    return folder


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of every file below `folder`, by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def graphs_changed(
    bundle: Bundle, folder: Path, change: Callable[["ir.Model"], None], *, variant: str = "ort"
) -> Bundle:
    """Copy the graphs of a bundle to `folder` and change the layers of one variant."""
    import onnx_ir as ir

    from export_grok.export.graphs import write_graph

    folder.mkdir()
    for path in bundle.folder.glob("*.onnx"):
        shutil.copy(path, folder)
    for layer in range(bundle.config.num_layers):
        path = folder / graph_file("layer", layer, variant=variant)
        model = ir.load(path)
        change(model)
        write_graph(model, path)
    return dataclasses.replace(bundle, folder=folder)
