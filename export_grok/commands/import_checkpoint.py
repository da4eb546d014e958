"""`export-grok import`: weights in any layout to a store."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from export_grok.commands.options import FOLDER, config_option, json_option, layers_option
from export_grok.commands.preflight import preflight, preflight_options
from export_grok.config import GrokConfig

if TYPE_CHECKING:
    from export_grok.export.quantisation import QuantisedTensor
    from export_grok.export.store.importing import Import
    from export_grok.export.store.manifest import StoreManifest

__all__ = ["import_checkpoint"]

# Matrices whose error is shown.
MOST_SHOWN = 3


@click.command("import")
@click.argument("source", metavar="SRC", type=FOLDER)
@click.argument("out", metavar="DST", type=FOLDER)
@layers_option
@click.option(
    "--groups",
    type=click.Choice([1, 2, 4, 8]),
    help="Groups of rows with scales of their own where weights are made int8: the most ranks "
    "that can share the model. [default: the config's, for Grok-1 8]",
)
@config_option
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Files that are written at once. [default: 2 to 4, as there are cores]",
)
@click.option("--overwrite", is_flag=True, help="Replace a store that DST holds.")
@json_option
@preflight_options
def import_checkpoint(
    source: Path,
    out: Path,
    layers: int | None,
    groups: int | None,
    config: GrokConfig | None,
    workers: int | None,
    overwrite: bool,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Write the weights in SRC as a store: the folder DST, with a file for each layer.

    SRC is a released checkpoint, a store, or weights in another layout, which are made int8 on
    the way. A run that was broken off goes on when it is run again. DST/store.json says what DST
    was made from, with the sha256 of every tensor and source file.
    """
    from export_grok.export.open_source import open_source
    from export_grok.export.store.importing import planned_import
    from export_grok.progress import progress_bar

    opened = open_source(source, config, layers, groups)
    planned = planned_import(opened, out, overwrite=overwrite)
    needs = planned.needs(workers)
    if not preflight(needs, force=force, dry_run=dry_run, writes=f"a store into {out}"):
        return
    began = time.monotonic()
    with progress_bar("importing", planned.total, unit="bytes") as advance:
        manifest = planned.run(workers=workers, progress=advance)
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(_summary(planned, manifest, seconds)))
    else:
        for line in _lines(planned, manifest, seconds):
            click.echo(line)


def _summary(planned: "Import", manifest: "StoreManifest", seconds: float) -> dict[str, Any]:
    return {
        "store": str(planned.out),
        "layout": manifest.layout,
        "layers": manifest.config.num_layers,
        "tensors": len(manifest.tensors),
        "bytes": planned.total,
        "written": planned.nbytes,
        "seconds": seconds,
        "bytes_per_second": planned.nbytes / seconds,
        "files": manifest.files,
        "source": {
            "root": str(planned.source.root),
            "files": len(manifest.source),
            "bytes": sum(file.bytes for file in manifest.source.values()),
        },
        "plan": manifest.plan,
        "quantised": [error.to_dict() for error in _worst_first(manifest)],
    }


def _lines(planned: "Import", manifest: "StoreManifest", seconds: float) -> Iterator[str]:
    layers = (
        "1 layer" if manifest.config.num_layers == 1 else f"{manifest.config.num_layers} layers"
    )
    written = "all of it was there"
    if not planned.done:
        rate = planned.nbytes / seconds / 1e6
        written = f"{planned.nbytes:,} written in {seconds:.1f} s, {rate:,.0f} MB/s"
    yield (
        f"{planned.out}: store of {layers} from {len(manifest.source)} files in layout "
        f"{manifest.layout}, {planned.total:,} bytes of tensors; {written}"
    )
    errors = _worst_first(manifest)
    if errors:
        worst = ", ".join(
            f"{error.name} {error.relative_error or 0:.2%}" for error in errors[:MOST_SHOWN]
        )
        yield f"made int8: {len(errors)} matrices; |error| / |float|, the worst: {worst}"


def _worst_first(manifest: "StoreManifest") -> "list[QuantisedTensor]":
    return sorted(
        manifest.errors.values(), key=lambda error: error.relative_error or 0.0, reverse=True
    )
