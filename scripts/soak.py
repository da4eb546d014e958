"""Load a model by many clients for minutes; no request may be lost, wrong, or keep anything.

    python -m scripts.soak BUNDLE --minutes 15 [--clients 16] [--batch 8] [--seed 1]

Clients in threads ask at random: prompts of one token to nearly the cache, some that begin alike,
conversations that are rewound, every parameter. They wait, read streams, cancel, walk away from
streams, forget what they asked, and come while the model is busy. Before that each request was
answered with nothing else running, and every answer under load must be the same, or its beginning
if it was cancelled. Where a token differs, the choice must have been open to the last bits of the
logits (`soaking/compare.py`). Every request ends once; then nothing is left running, no thread and
no file; and memory does not grow. The exit code is 1 if something was wrong.

BUNDLE has a small model and a tokenizer: that of the demo, for example.
"""

import dataclasses
import json
import secrets
import sys
from pathlib import Path

import click

from scripts.soaking.run import Options, Soak, soaked

__all__ = ["main"]

FOLDER = click.Path(path_type=Path)
SHOWN = 20  # faults


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=FOLDER)
@click.option("--minutes", default=15.0)
@click.option("--clients", default=16, help="Threads that ask.")
@click.option("--batch", default=8, help="Rows of the cache.")
@click.option("--pool", default=200, help="Different requests.")
@click.option("--max-waiting", default=6, help="Requests that may wait for a row.")
@click.option("--seed", type=int, help="Of the requests and the clients; another in each run.")
@click.option("--json", "json_file", type=FOLDER, help="File for all figures.")
def main(
    bundle: Path,
    minutes: float,
    clients: int,
    batch: int,
    pool: int,
    max_waiting: int,
    seed: int | None,
    json_file: Path | None,
) -> None:
    """Load the model of BUNDLE by many clients."""
    options = Options(
        minutes=minutes,
        clients=clients,
        batch=batch,
        pool=pool,
        max_waiting=max_waiting,
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
    )
    soak = soaked(bundle, options, lambda line: click.echo(line, err=True))
    for name, value in _table(options, soak).items():
        click.echo(f"{name:44} {value}")
    click.echo(f"{len(soak.faults)} faults")
    for fault in soak.faults[:SHOWN]:
        click.echo(f"  {fault}")
    if json_file:
        told = {"options": dataclasses.asdict(options), **soak.to_dict()}
        json_file.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(bool(soak.faults))


def _table(options: Options, soak: Soak) -> dict[str, str]:
    events, answers, figures = soak.events, soak.answers, soak.figures
    return {
        "clients, rows, places to wait, seed": f"{options.clients}, {options.batch}, "
        f"{options.max_waiting}, {options.seed}",
        "seconds under load": f"{soak.seconds:,.0f}",
        "requests, each ended once": f"{events['submitted']:,}",
        **{f"  {name}": f"{events[name]:,}" for name in sorted(events) if name[:6] == "ended:"},
        "turned away while busy": f"{answers.get('busy', 0):,}",
        "tokens of prompts": f"{events['prompt_tokens']:,}",
        "  a row held already": f"{events.get('cached_tokens', 0):,}",
        "tokens of answers": f"{events['new_tokens']:,}",
        "  a second": f"{figures['tokens_per_second']:,.0f}",
        "rows in use, mean": f"{figures['rows_in_use']:.2f}",
        "answers equal to those alone": f"{answers.get('equal', 0):,}",
        "cancelled ones that begin them": f"{answers.get('cancelled, its beginning', 0):,}",
        "that part from them": f"{answers.get('parted', 0):,}",
        "  where the choice was open": f"{answers.get('parted where the choice was open', 0):,}",
        "largest difference of a logprob": f"{figures['largest_logprob_difference']:.1e}",
        "streams read, left, requests forgotten": f"{answers.get('streamed', 0):,}, "
        f"{answers.get('walked_away', 0):,}, {answers.get('forgotten', 0):,}",
        "conversations": f"{answers.get('conversation', 0):,}",
        "memory behind a third, at the end": f"{figures['memory_first'] / 1e6:.1f}, "
        f"{figures['memory_last'] / 1e6:.1f} MB",
        "  growth, KiB a minute": f"{figures['memory_growth'] / 1024:.1f}, last two thirds",
    }


if __name__ == "__main__":
    main()
