"""Make what the peers load, each file once: checkpoint, engine, GGUF, graph, reference logits."""

import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import click
import numpy as np
from matrices import Matrices
from measure import PROMPT, tokens_of
from mid_model import write_mid_model
from nbits_model import GRAPH, write_nbits_model
from numpy.typing import NDArray
from reference import reference_logits

from export_grok.export.checkpoint import open_weights
from export_grok.export.weights_to.gguf import gguf_files
from export_grok.files import atomic_file

__all__ = ["prepare"]


def prepare(folder: Path, models: Collection[str]) -> tuple[Matrices, NDArray[np.float64]]:
    """Return the weights, and the logits that are right for the prompt, [S, V].

    Args:
        folder: of the comparison. What is there already is taken as it is.
        models: what the peers need of `engine`, `llama.gguf`, `nbits` and `checkpoint`.

    Raises:
        ExportGrokError: something cannot be written or read.
    """
    checkpoint, reference = folder / "checkpoint", folder / "reference.npy"
    folder.mkdir(parents=True, exist_ok=True)
    _make(checkpoint, "a random checkpoint", lambda: write_mid_model(checkpoint))
    weights = Matrices(*open_weights(checkpoint))
    if "engine" in models:
        _build_engine(checkpoint, folder / "engine")
    if "llama.gguf" in models:
        file = folder / "llama.gguf"
        _make(file, "the weights as Q8_0", lambda: _write_gguf(weights, file))
    if "nbits" in models:
        graph = folder / "nbits"
        _make(
            graph / GRAPH, "the weights as 8-bit blocks", lambda: write_nbits_model(weights, graph)
        )
    _make(reference, "the logits in float64", lambda: _write_reference(weights, reference))
    return weights, np.load(reference)


def _make(path: Path, what: str, make: Callable[[], None]) -> None:
    if not path.exists():
        click.echo(f"writing {what}: {path}", err=True)
        make()


def _build_engine(checkpoint: Path, engine: Path) -> None:
    # Returns at once if it is there; makes it again if the program was changed.
    command = [sys.executable, "-m", "export_grok", "build-engine", str(checkpoint)]
    options = ["--out", str(engine), "--head", "int8"]
    if subprocess.run([*command, *options], stdout=sys.stderr, check=False).returncode:
        raise click.ClickException(f"{engine} was not built")


def _write_gguf(weights: Matrices, path: Path) -> None:
    (file,) = gguf_files(weights.config, weights.index, name=path.stem, head="int8")
    file.write(path, lambda done: None)


def _write_reference(weights: Matrices, path: Path) -> None:
    logits = reference_logits(weights, tokens_of(weights.config.vocab_size, PROMPT).tolist())
    with atomic_file(path) as file:
        np.save(file, logits)
