"""What a command says before it takes long or much, and `--dry-run` and `--force`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from export_grok.needs import Needs, OnNeeds

__all__ = ["asking", "preflight", "preflight_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


def preflight_options(command: Command) -> Command:
    """Add `--force` and `--dry-run`, which the command hands to `preflight` or `asking`."""
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


def preflight(needs: Needs, *, force: bool, dry_run: bool, writes: str | None = None) -> bool:
    """Say what the work needs if that is much, and return whether to do it.

    Args:
        needs: of the work, once its input is checked.
        force: do it even where there is too little.
        dry_run: say it on stdout, however little, and do not do it.
        writes: what would be written where, for a dry run to say.

    Raises:
        NeedsError: there is too little of something, and `force` is not given.
    """
    if dry_run:
        click.echo(f"needs {needs}")
        if writes is not None:
            click.echo("writes nothing: all is there" if needs.nothing else f"writes {writes}")
    elif needs.much:
        click.echo(f"needs {needs}", err=True)
    if not force:
        needs.check()
    return not dry_run


def asking(*, force: bool, dry_run: bool, writes: str = "nothing") -> OnNeeds:
    """Return what a stage hands its needs to: it goes on, or the command ends there.

    The arguments are those of `preflight`.
    """

    def on_needs(needs: Needs) -> None:
        if not preflight(needs, force=force, dry_run=dry_run, writes=writes):
            click.get_current_context().exit()

    return on_needs
