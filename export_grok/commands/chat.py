"""`export-grok chat`: a conversation with a bundle, line by line."""

import sys
from pathlib import Path

import click

from export_grok.commands.dialogue import Dialogue, Manner, typed_lines
from export_grok.commands.generation_options import generation_options
from export_grok.commands.options import (
    FOLDER,
    max_length_option,
    threads_option,
    tp_option,
    weights_root_option,
)
from export_grok.commands.preflight import asking, preflight_options
from export_grok.runtime.params import GenerationParams

__all__ = ["chat"]

# A model without an end to its answers would fill the cache with the first.
MAX_NEW_TOKENS = 256


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option(
    "--user", default="User: ", show_default=True, help="What stands before a line of yours."
)
@click.option(
    "--reply",
    default="\nGrok:",
    show_default="a newline and Grok:",
    help="What stands between a line of yours and its answer.",
)
@click.option(
    "--raw", is_flag=True, help="Send lines as they are: no --user, no --reply, no stop of theirs."
)
@max_length_option
@generation_options(
    seed_help="Of the first answer; the next has the next.", max_new_tokens=MAX_NEW_TOKENS
)
@threads_option
@tp_option
@weights_root_option
@preflight_options
def chat(
    bundle: Path,
    user: str,
    reply: str,
    raw: bool,
    max_length: int | None,
    params: GenerationParams,
    threads: int | None,
    tp: int | None,
    weights_root: Path | None,
    force: bool,
    dry_run: bool,
) -> None:
    """Talk with the engine in BUNDLE: each line is answered, and what was said is kept.

    Grok-1 is no chat model: it continues a text. Lines and answers are put together as a dialogue,
    and an answer ends where the model begins the next line of yours. /help tells the commands;
    Ctrl-C ends an answer, and at the prompt the program.
    """
    from export_grok.runtime.model_to_load import ModelToLoad, Reach

    to_load = ModelToLoad.of(
        bundle,
        max_length=max_length,
        threads=threads,
        tensor_parallel=tp,
        weights_root=weights_root,
    )
    length = to_load.max_length
    with to_load.load(
        Reach(prompt=length - 1, whole=length),
        batch=1,
        max_waiting=1,
        on_needs=asking(force=force, dry_run=dry_run),
    ) as model:
        try:
            Dialogue(model, Manner() if raw else Manner(user, reply), params).run(typed_lines())
        except KeyboardInterrupt:  # at the prompt: the way out, as of other programs
            click.echo()
            sys.exit(130)
