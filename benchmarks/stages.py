"""From random weights to an engine, by the stages that a user runs; what is there is taken."""

import contextlib
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from export_grok.config import GrokConfig
from export_grok.errors import ExportGrokError
from export_grok.export.parameters import head_parameters, model_parameters
from export_grok.weights import NUMPY_DTYPES

__all__ = ["built_engine", "made_checkpoint", "run_stage", "told_in_a_line"]


def made_checkpoint(
    folder: Path,
    config: GrokConfig,
    write: Callable[[GrokConfig, Path], None],
    *,
    engines: int = 1,
) -> Path:
    """Return the folder of the checkpoint in `folder`, which is written if there is none.

    Args:
        folder: is made if it is not there.
        config: of a checkpoint that has to be written.
        write: writes it.
        engines: so many will be built, each with an int8 head of its own.

    Raises:
        ClickException: the disk has too little room.
        OutputError: it cannot be written.
    """
    checkpoint = folder / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():
        _check_room(folder, _bytes(config, engines))
        click.echo(f"writing a random checkpoint: {checkpoint}", err=True)
        write(config, checkpoint)
    return checkpoint


def built_engine(checkpoint: Path, layers: int) -> Path:
    """Return the engine of the first so many layers, head in int8, beside the checkpoint.

    One that is there is kept, and made again if the program was changed.

    Raises:
        ClickException: it was not built.
    """
    engine = checkpoint.parent / f"engine_{layers}"
    options = ["--out", str(engine), "--head", "int8", "--layers", str(layers)]
    run_stage("build-engine", str(checkpoint), *options)
    return engine


def run_stage(*arguments: str) -> str:
    """Return what export-grok prints; what it says on stderr goes there.

    Raises:
        ClickException: it failed.
    """
    command = [sys.executable, "-m", "export_grok", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(
            f"export-grok {' '.join(arguments)} failed with status {done.returncode}"
        )
    return done.stdout


@contextlib.contextmanager
def told_in_a_line() -> Iterator[None]:
    """Let an error that a user can act on end the program without a traceback."""
    try:
        yield
    except ExportGrokError as error:
        raise click.ClickException(str(error)) from error


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise click.ClickException(
            f"{folder} has {free / 1e9:.1f} GB of free disk; {needed / 1e9:.1f} GB are needed: "
            "free some, or choose another folder"
        )


def _bytes(config: GrokConfig, engines: int) -> int:
    parameters = [
        *model_parameters(config).values(),
        *engines * list(head_parameters(config).values()),
    ]
    return sum(math.prod(each.shape) * NUMPY_DTYPES[each.dtype].itemsize for each in parameters)
