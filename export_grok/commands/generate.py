"""`export-grok generate`: text from a bundle."""

from pathlib import Path

import click

from export_grok.commands.options import (
    FOLDER,
    json_option,
    threads_option,
    tp_option,
    weights_root_option,
)
from export_grok.commands.preflight import asking, preflight_options
from export_grok.runtime.params import SamplingParams

__all__ = ["generate"]


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    required=True,
    help="Text to continue; several are run together.",
)
@click.option("--max-new-tokens", type=int, help="Longest answer. [default: to the end]")
@click.option("--max-length", type=int, help="Longest prompt and answer. [default: the model's]")
@click.option(
    "--temperature",
    type=float,
    default=SamplingParams.temperature,
    show_default=True,
    help="0 is greedy.",
)
@click.option(
    "--top-k", type=int, default=SamplingParams.top_k, show_default=True, help="0 is off."
)
@click.option("--top-p", type=float, default=SamplingParams.top_p, show_default=True)
@click.option(
    "--seed",
    type=int,
    default=SamplingParams.seed,
    show_default=True,
    help="Of the first prompt; the next has the next.",
)
@threads_option
@tp_option
@weights_root_option
@json_option
@preflight_options
def generate(
    bundle: Path,
    prompts: tuple[str, ...],
    max_new_tokens: int | None,
    max_length: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    threads: int | None,
    tp: int | None,
    weights_root: Path | None,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Continue prompts with the engine in BUNDLE. Answers go to stdout as they are made."""
    from export_grok.runtime.answers import print_answers
    from export_grok.runtime.generate import stream

    sampling = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed + row)
        for row in range(len(prompts))
    ]
    print_answers(
        prompts,
        lambda on_usage: stream(
            bundle,
            prompts,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            threads=threads,
            tensor_parallel=tp,
            weights_root=weights_root,
            on_needs=asking(force=force, dry_run=dry_run),
            on_usage=on_usage,
        ),
        as_json=as_json,
    )
