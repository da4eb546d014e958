"""Options of an answer, which several commands share: how its tokens are chosen, where it ends."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from export_grok.runtime.params import GenerationParams

__all__ = ["generation_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


def _biases(
    _context: click.Context, _option: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    biases: dict[int, float] = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            key, number = int(token), float(bias)
        except ValueError as error:
            raise click.BadParameter(
                f"{value!r} is no token id with a number; write e.g. 42=-1.5, or 42=-inf."
            ) from error
        if key in biases:
            raise click.BadParameter(f"token {key} is given twice; give it one number.")
        biases[key] = number
    return biases


def generation_options(
    *, seed_help: str, max_new_tokens: int | None = GenerationParams.max_new_tokens
) -> Callable[[Command], Callable[..., Any]]:
    """Return what adds the options of an answer; the command takes them as one, `params`.

    Args:
        seed_help: what the seed is of.
        max_new_tokens: longest answer if none is given.
    """
    defaults = GenerationParams
    options = (
        click.option(
            "--max-new-tokens",
            type=int,
            default=max_new_tokens,
            help=f"Longest answer. [default: {max_new_tokens or 'to the end'}]",
        ),
        click.option(
            "--temperature",
            type=float,
            default=defaults.temperature,
            show_default=True,
            help="0 is greedy.",
        ),
        click.option(
            "--top-k", type=int, default=defaults.top_k, show_default=True, help="0 is off."
        ),
        click.option(
            "--top-p", type=float, default=defaults.top_p, show_default=True, help="1 is off."
        ),
        click.option(
            "--min-p",
            type=float,
            default=defaults.min_p,
            show_default=True,
            help="Least probability, as a part of the largest one; 0 is off.",
        ),
        click.option(
            "--repetition-penalty",
            type=float,
            default=defaults.repetition_penalty,
            show_default=True,
            help="More than 1 makes what was said less likely.",
        ),
        click.option(
            "--stop",
            multiple=True,
            metavar="TEXT",
            help="Text that ends an answer and is no part of it; several. It is taken as it is: a "
            "newline is written $'\\n' in bash.",
        ),
        click.option("--seed", type=int, default=defaults.seed, show_default=True, help=seed_help),
        click.option(
            "--logprobs",
            type=int,
            metavar="N",
            help="Report the logarithm of each token's probability, and the N most probable.",
        ),
        click.option(
            "--logit-bias",
            multiple=True,
            callback=_biases,
            metavar="ID=VALUE",
            help="Added to the logit of a token id, -inf forbids it; several.",
        ),
        click.option("--ignore-eos", is_flag=True, help="Go on behind the end of the text."),
    )
    names = [field.name for field in dataclasses.fields(GenerationParams)]

    def added(command: Command) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_params(**given: Any) -> Any:
            params = GenerationParams(**{name: given.pop(name) for name in names})
            return command(params=params, **given)

        for option in reversed(options):
            with_params = option(with_params)
        return with_params

    return added
