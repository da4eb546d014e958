"""What a command says before it takes long or much, and `--dry-run` and `--force`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from export_grok.needs import Needs

__all__ = ["preflight", "preflight_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


def preflight_options(command: Command) -> Command:
    """Add `--force` and `--dry-run`, which the command hands to `preflight`."""
    for option in (
        click.option(
            "--force", is_flag=True, help="Begin even if there is too little disk or memory."
        ),
        click.option(
            "--dry-run", is_flag=True, help="Check the input, say what it needs, and do nothing."
        ),
    ):
        command = option(command)
    return command


def preflight(needs: Needs, *, force: bool, dry_run: bool) -> bool:
    """Say what the work needs if that is much, and return whether to do it.

    Args:
        needs: of the work, once its input is checked.
        force: do it even where there is too little.
        dry_run: say it on stdout, however little, and do not do it.

    Raises:
        NeedsError: there is too little of something, and `force` is not given.
    """
    if dry_run:
        click.echo(f"needs {needs}")
    elif needs.much:
        click.echo(f"needs {needs}", err=True)
    if not force:
        needs.check()
    return not dry_run
