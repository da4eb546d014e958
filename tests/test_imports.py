"""What a command needs is loaded when it runs, and nothing that it does not need."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import export_grok
from export_grok.cli import cli
from tests.bundles import BundleOf, bundle_of

__all__ = ["bundle_of"]

HEAVY = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "tensorrt",
    "triton",
    "cuda",
    "nccl",
    "polygraphy",
    "prometheus_client",
    "numpy",
    "ml_dtypes",
    "rich",
    "sentencepiece",
    "safetensors",
)

# Prints what was loaded as the last line of stderr, whatever the command did.
RUN = f"""
import sys
from export_grok.cli import main
try:
    main(sys.argv[1:])
finally:
    import json
    print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr)
"""


def loaded_by(*arguments: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    return set(json.loads(run.stderr.splitlines()[-1]))


@pytest.mark.parametrize("command", [None, *cli.commands])
def test_help_loads_nothing_heavy(command: str | None) -> None:
    assert loaded_by(*([command] if command else []), "--help") == set()


def test_generate_loads_neither_torch_nor_onnx(bundle_of: BundleOf) -> None:
    folder = str(bundle_of("demo").folder)
    loaded = loaded_by("generate", folder, "--prompt", "a", "--max-new-tokens", "2", "--json")
    assert loaded == {"numpy", "ml_dtypes", "sentencepiece", "onnxruntime"}


def test_logits_load_neither_torch_nor_onnx(bundle_of: BundleOf, tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "tokens.npy", [[5, 6]])
    loaded = loaded_by(
        "logits",
        str(bundle_of("demo").folder),
        "--tokens",
        str(tmp_path / "tokens.npy"),
        "--out",
        str(tmp_path / "logits.npz"),
    )
    assert loaded == {"numpy", "ml_dtypes", "onnxruntime"}


def test_a_checkpoint_is_checked_and_counted_without_torch_and_onnx(
    bundle_of: BundleOf,
) -> None:
    checkpoint = str(bundle_of("demo").weights_root)
    assert loaded_by("index", checkpoint) == {"numpy", "ml_dtypes"}
    assert loaded_by("inspect", checkpoint, "--json") == {"numpy", "ml_dtypes"}


def test_a_demo_is_made_without_torch_and_onnx(tmp_path: Path) -> None:
    loaded = loaded_by("demo-checkpoint", str(tmp_path / "demo"))
    assert loaded == {"numpy", "ml_dtypes"}


# Packages that a part of the code is for, and that need not be installed.
OPTIONAL = {"tensorrt", "cuda", "triton", "nccl", "polygraphy", "torch", "onnx", "onnxruntime"}


@pytest.mark.parametrize(
    "name",
    [
        info.name
        for info in pkgutil.walk_packages(export_grok.__path__, "export_grok.")
        if not info.name.endswith("__main__")
    ],
)
def test_every_module_can_be_imported(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package not in OPTIONAL:
            raise
        pytest.skip(f"{package} is not installed")
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public)
    assert module.__doc__
