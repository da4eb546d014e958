"""`export-grok doctor`: what this installation can do, and why not more."""

import dataclasses
import json
import textwrap
from typing import TYPE_CHECKING

import click

from export_grok.commands.options import json_option
from export_grok.errors import MissingDependencyError

if TYPE_CHECKING:
    from export_grok.engines.installation import Extra, Installation
    from export_grok.machine import Machine

__all__ = ["doctor"]


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this installation can do, and why not more.

    Fails if engines do not run here, and says what to do.
    """
    from export_grok.engines.installation import this_installation

    installation = this_installation()
    if as_json:
        click.echo(json.dumps(_values(installation), default=str))
    else:
        _print(installation)
    if installation.faults:
        raise MissingDependencyError("\n  ".join(installation.faults))


def _values(installation: "Installation") -> dict[str, object]:
    value = dataclasses.asdict(installation)
    for extra, found in zip(value["extras"], installation.extras, strict=True):
        extra["command"] = found.command
    return value


def _print(installation: "Installation") -> None:
    from export_grok.engines.installation import sentence

    kernels, runtime = installation.kernels, installation.runtime
    _row("export-grok", f"{installation.version} in {installation.folder}")
    _row("Python", f"{installation.python}, {installation.executable}")
    _row("machine", _machine(installation.machine))
    _row("CPU kernels", sentence(kernels) if kernels else "none, see below")
    if kernels and kernels.library:
        _row("", f"{kernels.library}, here with {', '.join(kernels.supported)}")
    if installation.newer:
        _row("", f"{installation.newer} is newer: to compile it, install export-grok again")
    _row(
        "ONNX Runtime",
        ", ".join(
            f"{package.version} ({package.name}; {package.wanted} or newer will do)"
            for package in runtime
        )
        or "not installed",
    )
    for extra in installation.extras:
        _row(f"[{extra.name}]", _extra(extra))
        if extra.command:
            click.echo(f"{'':15} {extra.command}")
    if not installation.faults:
        click.echo("Engines run here.")


def _row(name: str, text: str) -> None:
    lines = textwrap.wrap(text, 82, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        click.echo(f"{'' if number else name:15} {line}")


def _machine(machine: "Machine") -> str:
    cores, memory = f"{machine.cores} cores", f"{machine.memory / 1e9:.1f} GB of memory"
    if machine.core_limit is not None:
        cores += f" (limited to {machine.core_limit:g} by its control group)"
    if machine.memory_limit is not None:
        memory += f" (limited to {machine.memory_limit / 1e9:.1f} GB by its control group)"
    return f"{machine.system}; {machine.cpu}, {cores}, {memory}"


def _extra(extra: "Extra") -> str:
    has = [f"{package.name} {package.version}" for package in extra.packages if package.version]
    lacks = [f"{package.name} {package.wanted}" for package in extra.packages if not package.suits]
    text = f"for {extra.purpose}"
    if has:
        text += f"; has {', '.join(has)}"
    if lacks:
        text += f"; lacks {', '.join(lacks)} or newer:"
    return text
