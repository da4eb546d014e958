"""`export-grok c-library`: the engines for C and C++ programs."""

import json
from pathlib import Path

import click

from export_grok.commands.options import FOLDER, json_option
from export_grok.commands.preflight import asking, preflight_options

__all__ = ["c_library"]


@click.command("c-library")
@click.option("--out", type=FOLDER, required=True, help="Folder to write.")
@json_option
@preflight_options
def c_library(out: Path, as_json: bool, force: bool, dry_run: bool) -> None:
    """Make a library that C and C++ programs link, for the Python that runs this.

    It starts this very Python, with its packages, wherever it is called from: make it again for
    another one, or when this one moves. docs/embedding.md says how it is used.
    """
    from export_grok.runtime.c_library.build import build_library

    writes = f"a library, headers and what finds them, into {out}"
    files = build_library(out, on_needs=asking(force=force, dry_run=dry_run, writes=writes))
    if as_json:
        click.echo(json.dumps({"folder": str(out), "files": list(map(str, files))}))
        return
    for path in files:
        click.echo(out / path)
