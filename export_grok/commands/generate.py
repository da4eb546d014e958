"""`export-grok generate`: text from a bundle, to prompts or to a file of requests."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from export_grok.commands.generation_options import generation_options
from export_grok.commands.options import (
    FOLDER,
    json_option,
    max_length_option,
    threads_option,
    tp_option,
    weights_root_option,
)
from export_grok.commands.preflight import asking, preflight_options
from export_grok.errors import ExportGrokError
from export_grok.needs import OnNeeds
from export_grok.runtime.params import GenerationParams

if TYPE_CHECKING:
    from export_grok.runtime.model_to_load import ModelToLoad

__all__ = ["generate"]


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; several.")
@click.option(
    "--file",
    "files",
    type=FOLDER,
    multiple=True,
    help="File that is a prompt in UTF-8, its last newline too; - is stdin; several.",
)
@click.option(
    "--jsonl",
    "requests",
    type=FOLDER,
    metavar="IN",
    help='File of one request a line, - is stdin: {"prompt": TEXT} or {"tokens": [ID, ...]}, with '
    "an id and options of its own if it likes, by their names with _ for -.",
)
@click.option(
    "--out", type=FOLDER, help="With --jsonl: file of the answers, a line each, in their order."
)
@click.option("--overwrite", is_flag=True, help="With --jsonl: replace what --out holds.")
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Requests that run at once. [default: all, up to 8]",
)
@max_length_option
@generation_options(seed_help="Of the first request; the next has the next.")
@threads_option
@tp_option
@weights_root_option
@json_option
@preflight_options
def generate(
    bundle: Path,
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    requests: Path | None,
    out: Path | None,
    overwrite: bool,
    batch: int | None,
    max_length: int | None,
    params: GenerationParams,
    threads: int | None,
    tp: int | None,
    weights_root: Path | None,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Continue prompts with the engine in BUNDLE.

    Give --prompt, --file or --jsonl. Answers to the first two go to stdout as they are made. A
    run of --jsonl that was broken off goes on when the same command is given again.
    """
    _check_use(prompts, files, requests, out, overwrite=overwrite, as_json=as_json)
    from export_grok.runtime.model_to_load import ModelToLoad

    model = ModelToLoad.of(
        bundle,
        max_length=max_length,
        threads=threads,
        tensor_parallel=tp,
        weights_root=weights_root,
    )
    if requests is not None and out is not None:
        on_needs = asking(force=force, dry_run=dry_run, writes=f"the answers into {out}")
        _answer_file(model, requests, out, params, batch, overwrite, on_needs)
        return
    from export_grok.runtime.answers import print_answers
    from export_grok.runtime.prompt_file import read_prompt

    texts = [*prompts, *map(read_prompt, files)]
    print_answers(
        model,
        texts,
        [dataclasses.replace(params, seed=params.seed + row) for row in range(len(texts))],
        batch=batch,
        as_json=as_json,
        on_needs=asking(force=force, dry_run=dry_run),
    )


def _answer_file(
    model: "ModelToLoad",
    requests: Path,
    out: Path,
    params: GenerationParams,
    batch: int | None,
    overwrite: bool,
    on_needs: OnNeeds,
) -> None:
    from export_grok.runtime.jsonl.run import answer_file, part_of

    try:
        answered = answer_file(
            model, requests, out, params, batch=batch, overwrite=overwrite, on_needs=on_needs
        )
    except KeyboardInterrupt:
        if part_of(out).exists():
            click.echo(f"{part_of(out)} has the answers so far", err=True)
        raise
    before = f", {answered.found} of them from before" if answered.found else ""
    click.echo(f"{out}: {answered.answers} answers{before}")
    if answered.errors:
        raise ExportGrokError(
            f"{answered.errors} of {answered.answers} answers ended by an error; see `error` in "
            f"{out}"
        )


def _check_use(
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    requests: Path | None,
    out: Path | None,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    kinds = {"--prompt": prompts, "--file": files, "--jsonl": requests}
    given = [name for name, value in kinds.items() if value]
    if len(given) != 1:
        said = f"{' and '.join(given)} are given" if given else "there is no prompt"
        raise click.UsageError(f"{said}; give one of --prompt, --file and --jsonl.")
    if files.count(Path("-")) > 1:
        raise click.UsageError("--file - is given twice; stdin is read once.")
    if requests is None and (out is not None or overwrite):
        raise click.UsageError("--out and --overwrite go with --jsonl.")
    if requests is not None and out is None:
        raise click.UsageError("--jsonl needs --out: where do the answers go?")
    if requests is not None and as_json:
        raise click.UsageError("--json goes with --prompt and --file; --out is JSON as it is.")
    if requests is not None and out is not None and requests.resolve() == out.resolve():
        raise click.UsageError("--jsonl and --out are one file; name another for the answers.")
