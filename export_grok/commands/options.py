"""Options that several commands share."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from export_grok.config import (
    DTYPES,
    GROK_1,
    HEAD_DTYPES,
    SUMS,
    EngineOptions,
    ExportOptions,
    GrokConfig,
)
from export_grok.errors import ConfigError

__all__ = [
    "FOLDER",
    "config_option",
    "engine_options",
    "finite",
    "graph_options",
    "json_option",
    "layers_option",
    "max_length_option",
    "plot_option",
    "threads_option",
    "tp_option",
    "weights_root_option",
]

Command = TypeVar("Command", bound=Callable[..., Any])

# Not `exists=True`: the stage that reads a path says what should be there.
FOLDER = click.Path(path_type=Path)
PICTURES = (".png", ".svg", ".pdf")


def _config_of(_context: click.Context, _option: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    return GROK_1 if value == "grok-1" else GrokConfig.from_file(Path(value))


def finite(_context: click.Context, _option: click.Parameter, value: float) -> float:
    """Refuse nan and inf, which JSON cannot say.

    Raises:
        BadParameter: the value is one of them.
    """
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def _picture(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in PICTURES:
        raise ConfigError(f"{path} is no picture this can draw; end it in {', '.join(PICTURES)}")
    return path


config_option = click.option(
    "--config",
    callback=_config_of,
    metavar="grok-1|FILE",
    help="Hyper-parameters: a preset or a JSON file. "
    "[default: config.json beside the weights, else grok-1]",
)
plot_option = click.option(
    "--plot", type=FOLDER, callback=_picture, help=f"Draw it too: {', '.join(PICTURES)}."
)
layers_option = click.option("--layers", type=int, help="Only the first so many layers.")
weights_root_option = click.option(
    "--weights-root",
    type=FOLDER,
    help="Where the weights are now, if the bundle points at ones that were moved.",
)
threads_option = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads to compute with. [default: all cores]"
)
tp_option = click.option(
    "--tp",
    type=click.IntRange(min=1),
    help="Ranks that share the work: taken from the bundle; given, it must be that.",
)
max_length_option = click.option(
    "--max-length", type=int, help="Longest prompt and answer. [default: the model's]"
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _architectures(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} is no list of architectures; write e.g. 80,89,120."
        ) from error


def engine_options(command: Command) -> Command:
    """Add the options that are fixed when a TensorRT engine is built."""
    for option in (
        click.option(
            "--sums",
            type=click.Choice(SUMS),
            default=EngineOptions.sums,
            show_default=True,
            help="TensorRT: where ranks are summed, in the plans or by NCCL between plans.",
        ),
        click.option(
            "--gpu-memory",
            type=float,
            help="TensorRT: memory of one GPU in GB. [default: the most there is of an --sm]",
        ),
        click.option(
            "--max-length",
            type=int,
            help="TensorRT: longest row, prompt and answer, in tokens. [default: the model's]",
        ),
        click.option(
            "--chunk", type=int, help="TensorRT: tokens of a prompt at once. [default: 256]"
        ),
        click.option("--batch", type=int, help="TensorRT: rows of a decode step. [default: 1]"),
        click.option(
            "--tp", type=int, default=1, show_default=True, help="Ranks that share every layer."
        ),
        click.option(
            "--sm",
            callback=_architectures,
            metavar="N,...",
            help="TensorRT: GPU architectures, compute capability times ten, e.g. 80,89,120. "
            "[default: the GPU here, or all that can be built for]",
        ),
    ):
        command = option(command)
    return command


def graph_options(command: Command) -> Command:
    """Add the options of the stage from weights to graphs; their names are those of its fields."""
    defaults = ExportOptions
    for option in (
        config_option,
        click.option("--overwrite", is_flag=True, help="Replace what --out holds."),
        click.option(
            "--weights",
            type=click.Choice(["reference", "copy"]),
            default="copy" if defaults.copy_weights else "reference",
            show_default=True,
            help="Point at the weights where they lie, or copy them into --out.",
        ),
        layers_option,
        click.option(
            "--head",
            type=click.Choice(HEAD_DTYPES),
            default=defaults.head,
            show_default=True,
            help="Matrix of the head: the embedding's table, or an int8 copy of it in --out.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default=defaults.dtype,
            help="Of activations and cache. [default: float32; for TensorRT bfloat16]",
        ),
    ):
        command = option(command)
    return command
