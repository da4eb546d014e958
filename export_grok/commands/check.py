"""`export-grok check`: whether weights are whole and sound."""

import json
from pathlib import Path

import click

from export_grok.commands.options import (
    FOLDER,
    config_option,
    json_option,
    layers_option,
    weights_root_option,
)
from export_grok.commands.preflight import preflight, preflight_options
from export_grok.config import GrokConfig
from export_grok.errors import VerificationError
from export_grok.machine import this_machine
from export_grok.progress import progress_bar

__all__ = ["check"]


@click.command()
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.option(
    "--hashes",
    type=FOLDER,
    metavar="FILE",
    help="Hold whole files to these sha256 hashes: the output of sha256sum (Hugging Face shows "
    "the hash of each file of xai-org/grok-1), or the store.json of a store made from them.",
)
@layers_option
@config_option
@weights_root_option
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Files to read at the same time; 1 for a disk that turns. [default: all cores]",
)
@preflight_options
@json_option
def check(
    folder: Path,
    hashes: Path | None,
    layers: int | None,
    config: GrokConfig | None,
    weights_root: Path | None,
    workers: int | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Read every byte of the weights in DIR and list all that is wrong.

    DIR is a checkpoint, a store, or a bundle with the weights that it holds or points at. Headers,
    shapes and sizes are held to the config, bytes to the hashes that are known of them, values to
    what a model can hold. Leaves with exit code 1 if anything is wrong; what is only doubtful is
    listed too.
    """
    from export_grok.export.check.hash_list import HashList
    from export_grok.export.check.plan import check_plan
    from export_grok.export.check.report import lines_of, listed, verdict
    from export_grok.export.check.soundness import soundness_of

    plan = check_plan(
        folder,
        config=config,
        layers=layers,
        hashes=None if hashes is None else HashList.read(hashes),
        weights_root=weights_root,
    )
    workers = workers or this_machine().cores
    if preflight(plan.needs(workers), force=force, dry_run=dry_run):
        with progress_bar("checking", plan.nbytes, unit="bytes") as advance:
            found = soundness_of(plan, workers=workers, progress=advance)
        findings = found.findings
        for line in [json.dumps(found.to_dict())] if as_json else lines_of(found):
            click.echo(line)
    else:  # what the headers say is known
        findings = plan.findings
        for line in listed(findings):
            click.echo(line)
    if any(finding.level == "wrong" for finding in findings):
        raise VerificationError(verdict(folder, findings))
