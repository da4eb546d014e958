"""`export-grok doctor`: what this installation can do, and why not more."""

import dataclasses
import json
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

import click

from export_grok.commands.options import json_option
from export_grok.errors import MissingDependencyError

if TYPE_CHECKING:
    from export_grok.engines.gpus import Gpus
    from export_grok.engines.installation import Extra, Installation
    from export_grok.machine import Machine

__all__ = ["doctor"]


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this installation can do, and why not more.

    Fails if engines do not run here, and says what to do. What it finds of GPUs is told, each with
    what to do, and is no failure: engines for the CPU run.
    """
    from export_grok.engines.gpu_findings import gpu_findings
    from export_grok.engines.gpus import gpus_here
    from export_grok.engines.installation import this_installation

    installation, gpus = this_installation(), gpus_here()
    findings = gpu_findings(gpus)
    if as_json:
        found = dataclasses.asdict(gpus) | {"findings": findings}
        click.echo(json.dumps(_values(installation) | {"gpus": found}, default=str))
    else:
        _print(installation)
        _print_gpus(gpus, findings)
        if not installation.faults:
            click.echo("Engines run here.")
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


def _print_gpus(gpus: "Gpus", findings: tuple[str, ...]) -> None:
    if gpus.driver is None:
        _row("GPUs", "no NVIDIA driver here: engines for the CPU run, those of trt need one")
        return
    kinds = Counter((device.name, device.sm, device.memory) for device in gpus.devices)
    free = [device.free for device in gpus.devices if device.free is not None]
    _row("GPUs", f"driver {gpus.driver}" + (f"; {min(free) / 1e9:.1f} GB free" if free else ""))
    for (name, sm, memory), count in kinds.items():
        _row("", f"{count} x {name}, SM{sm}, {memory / 1e9:.1f} GB")
    if len(gpus.devices) > 1:
        reach = "not all" if gpus.apart else "all"
        shared = "no" if gpus.shared_memory is None else f"{gpus.shared_memory / 1e9:.1f} GB of"
        address = gpus.ports.address if gpus.ports else None
        _row(
            "",
            f"{reach} reach each other's memory; NCCL {gpus.nccl or 'not found'}; {shared} "
            f"/dev/shm; ranks meet at {address or '127.0.0.1'}",
        )
    for finding in findings:
        _row("  finding", finding)


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
