"""Every backend shows its graphs one at a time, or says what is missing for that."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from export_grok.engines.backend import backend_names, open_functions, open_probe
from export_grok.engines.probe import GraphName
from export_grok.engines.trt.record import Sizes
from export_grok.errors import ConfigError, MissingDependencyError
from tests.bundles import BundleOf
from tests.conftest import cuda_devices, load_golden
from tests.engines.trt.records import bundle_with, record_for


def test_graphs_are_called_as_users_call_them() -> None:
    names = [GraphName(kind="embedding"), GraphName(kind="layer", layer=7), GraphName(kind="head")]
    assert [str(name) for name in names] == ["embedding", "layer 7", "head"]
    assert len({*names, GraphName(kind="layer", layer=8), GraphName(kind="head")}) == 4


@pytest.mark.parametrize("backend", backend_names())
def test_every_backend_has_a_probe(backend: str) -> None:
    module = importlib.import_module(f"export_grok.engines.{backend.replace('-', '_')}.probe")
    assert callable(module.open_probe)


@pytest.mark.skipif(cuda_devices() > 0, reason="there is a GPU")
def test_without_a_gpu_a_probe_of_plans_says_what_can_be_done_without(tmp_path: Path) -> None:
    record = record_for(load_golden("tiny").config, Sizes(batch=2, chunk=4, max_length=16))
    bundle = bundle_with(record, "tiny", tmp_path)
    for backend in ("trt", "trt-rtx"):
        manifest = dataclasses.replace(bundle.manifest, backend=backend)
        with pytest.raises(MissingDependencyError, match=r"export-grok verify .* --interpret"):
            open_probe(dataclasses.replace(bundle, manifest=manifest))


def test_a_backend_that_is_not_known_is_named(bundle_of: BundleOf) -> None:
    bundle = bundle_of("tiny")
    bundle = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, backend="tpu")
    )
    with pytest.raises(ConfigError, match="no backend 'tpu'; use ort, trt, trt-rtx"):
        open_probe(bundle)


def test_function_bodies_are_run_whatever_the_backend(bundle_of: BundleOf) -> None:
    bundle = bundle_of("tiny")
    plans = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, backend="trt")
    )
    with open_functions(plans).graph(GraphName(kind="head")) as run:
        assert callable(run)


def test_a_probe_of_plans_loads_neither_torch_nor_onnx() -> None:
    script = (
        "import json, sys, export_grok.engines.trt.probe, export_grok.engines.backend\n"
        "print(json.dumps([name for name in ('torch', 'onnx', 'onnx_ir', 'onnxruntime', 'cuda', "
        "'tensorrt', 'tensorrt_rtx') if name in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == []
