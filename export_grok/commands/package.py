"""`export-grok package`: a bundle as a model of an inference server."""

import json
from pathlib import Path

import click

from export_grok.commands.options import (
    FOLDER,
    json_option,
    max_length_option,
    threads_option,
    tp_option,
    weights_root_option,
)
from export_grok.commands.preflight import asking, preflight_options
from export_grok.errors import OutputError

__all__ = ["package"]


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option(
    "--triton",
    "repository",
    type=FOLDER,
    required=True,
    metavar="DIR",
    help="Model repository of Triton Inference Server to write the model into.",
)
@click.option("--name", default="grok", show_default=True, help="Of the model, and its folder.")
@click.option(
    "--bundle-path",
    help="Where the server sees the bundle; a relative path starts from the model's folder. "
    "[default: where it is here]",
)
@click.option(
    "--weights-path",
    help="Where the server sees the weights. [default: where the bundle says, or --weights-root]",
)
@click.option("--batch", type=int, help="Requests that run at once. [default: the engine's, or 8]")
@click.option("--max-waiting", type=int, help="Requests that may wait. [default: 64]")
@max_length_option
@threads_option
@tp_option
@weights_root_option
@click.option("--overwrite", is_flag=True, help="Replace the files of an earlier package.")
@json_option
@preflight_options
def package(
    bundle: Path,
    repository: Path,
    name: str,
    bundle_path: str | None,
    weights_path: str | None,
    batch: int | None,
    max_waiting: int | None,
    max_length: int | None,
    threads: int | None,
    tp: int | None,
    weights_root: Path | None,
    overwrite: bool,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Write a model of Triton's Python backend that runs BUNDLE, which stays where it is.

    The server's Python needs export-grok. This has not been run under Triton yet: what was
    checked, and how to set it up, is in docs/embedding.md.
    """
    from export_grok.artifacts import open_bundle
    from export_grok.runtime.triton_server.repository import FILES, write_model
    from export_grok.runtime.triton_server.settings import Settings

    found = open_bundle(bundle, kind="engine", weights_root=weights_root)
    root = None if weights_root is None else str(weights_root.resolve())
    settings = Settings(
        bundle=str(bundle.resolve()) if bundle_path is None else bundle_path,
        weights_root=root if weights_path is None else weights_path,
        batch=batch,
        max_length=max_length,
        threads=threads,
        tensor_parallel=tp,
        max_waiting=max_waiting,
    )
    writes = f"a model of Triton into {repository / name}"
    try:
        folder = write_model(
            repository,
            name,
            found,
            settings,
            overwrite=overwrite,
            on_needs=asking(force=force, dry_run=dry_run, writes=writes),
        )
    except OutputError as error:  # which names the option that other commands have
        raise OutputError(str(error).replace("--out", "--triton")) from error
    if as_json:
        told = {"out": str(folder), "name": name, "files": list(FILES), "run_under_triton": False}
        click.echo(json.dumps(told | {"parameters": settings.parameters()}))
        return
    click.echo(f"{folder}: a model of Triton for {settings.bundle} (not run under Triton yet)")
