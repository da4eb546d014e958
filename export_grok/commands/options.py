"""Options that several commands share."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from export_grok.config import DTYPES, GROK_1, HEAD_DTYPES, ExportOptions, GrokConfig
from export_grok.errors import ConfigError

__all__ = [
    "FOLDER",
    "config_option",
    "finite",
    "graph_options",
    "json_option",
    "layers_option",
    "plot_option",
    "threads_option",
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
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


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
            show_default=True,
            help="Of activations and cache. The CPU engine takes float32.",
        ),
    ):
        command = option(command)
    return command
