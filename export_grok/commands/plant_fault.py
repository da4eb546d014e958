"""`export-grok plant-fault`: a wrong engine on purpose, to check a check."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from export_grok.commands.options import FOLDER, json_option, weights_root_option
from export_grok.commands.preflight import asking, preflight_options
from export_grok.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterable

    from export_grok.runtime.verify.faults.fault import Fault

__all__ = ["plant_fault"]

WIDTH = 100


@click.command("plant-fault")
@click.argument("bundle", type=FOLDER, required=False)
@click.argument("name", required=False)
@click.option("--out", type=FOLDER, help="Folder of the wrong engine, new or empty.")
@click.option(
    "--layer", type=int, help="Where to plant a fault of a layer. [default: mostly the middle]"
)
@click.option("--list", "listed", is_flag=True, help="Say which faults there are.")
@weights_root_option
@json_option
@preflight_options
def plant_fault(
    bundle: Path | None,
    name: str | None,
    out: Path | None,
    layer: int | None,
    listed: bool,
    weights_root: Path | None,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Write a copy of the engine in BUNDLE that is wrong on purpose, to check a check.

    NAME is that of a known mistake; --list shows all. A check of outputs that passes the copy,
    or names the wrong place, is too weak: `export-grok verify` has to fail on each.
    """
    if listed and (bundle or out):
        raise click.UsageError("--list says which faults there are, and makes nothing.")
    if not listed and (bundle is None or name is None or out is None):
        raise click.UsageError(
            "a BUNDLE, the NAME of a fault and --out DIR are needed; --list shows the names."
        )
    for package in ("torch", "onnx_ir"):
        require(package, extra="export")
    from export_grok.runtime.verify.faults.library import FAULTS, fault_named

    if bundle is None or name is None or out is None:
        _show(FAULTS.values(), as_json=as_json)
        return
    fault = fault_named(name)
    from export_grok.artifacts import open_bundle
    from export_grok.runtime.verify.faults.planting import PLANTED, plant_fault

    whole = open_bundle(bundle, kind="engine", weights_root=weights_root)
    wrong = plant_fault(
        whole,
        fault,
        out,
        layer=layer,
        on_needs=asking(force=force, dry_run=dry_run, writes=f"the wrong engine into {out}"),
    )
    place = wrong.manifest.engine[PLANTED]["layer"]
    if as_json:
        click.echo(json.dumps({"out": str(out), **_values(fault), "layer": place}))
        return
    where = fault.graph if place is None else f"layer {place}"
    click.echo(
        f"{out}: a wrong engine: {fault.title} ({fault.name} in {where}, first seen in "
        f"{fault.shows})"
    )


def _show(faults: "Iterable[Fault]", *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([_values(fault) for fault in faults]))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "shows in", "what is wrong then", box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for fault in faults:
        ranks = "" if fault.of_ranks is None else " (engines of ranks only)"
        table.add_row(fault.name, fault.shows, f"{fault.title}{ranks}")
    Console(width=None if Console().is_terminal else WIDTH, highlight=False).print(table)


def _values(fault: "Fault") -> dict[str, object]:
    return {
        "name": fault.name,
        "title": fault.title,
        "graph": fault.graph,
        "shows": fault.shows,
        "ranks": fault.of_ranks is not None,
    }
