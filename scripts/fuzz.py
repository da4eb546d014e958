"""Give readers wrong files by the thousand; whatever is wrong with a file, they must say so.

    python -m scripts.fuzz [--target NAME]... [--minutes 5 | --inputs 10000] [--seed 1]
    python -m scripts.fuzz --replay fuzz-findings/pickle-1-77

A finding is an error that is none of the program's own, a crash, a hang, something executed, a
file opened or written elsewhere, more memory than the file can be worth, or a tensor that does not
lie in its file. Its files are written to a folder, without the edits that it does not need. The
same seed gives the same inputs. The exit code is 1 if there are findings.
"""

import json
import os
import secrets
import sys
import tempfile
from pathlib import Path

import click

from scripts.fuzzing.keep import keep, kept_files
from scripts.fuzzing.run import Findings, fuzzed
from scripts.fuzzing.targets.all import TARGETS, made

__all__ = ["main"]

FOLDER = click.Path(path_type=Path)


@click.command(context_settings={"show_default": True})
@click.option("--target", "names", type=click.Choice(list(TARGETS)), multiple=True, help="[all]")
@click.option("--minutes", type=float, help="For each target.")
@click.option(
    "--inputs", type=int, help="For each target, if no minutes; what tests take by default."
)
@click.option("--seed", type=int, help="Of all inputs; another in each run by default.")
@click.option("--bundle", type=FOLDER, help="With copied weights, to take the graphs of.")
@click.option("--keep", "place", type=FOLDER, default="fuzz-findings", help="For findings.")
@click.option("--replay", type=FOLDER, help="A finding that was kept: give it again.")
@click.option("--json", "json_file", type=FOLDER, help="File for all figures.")
def main(
    names: tuple[str, ...],
    minutes: float | None,
    inputs: int | None,
    seed: int | None,
    bundle: Path | None,
    place: Path,
    replay: Path | None,
    json_file: Path | None,
) -> None:
    """Give readers wrong files by the thousand."""
    if replay:
        names = (json.loads((replay / "finding.json").read_text())["target"],)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    told = {}
    for name in names or TARGETS:
        with tempfile.TemporaryDirectory(prefix=f"fuzz_{name}_", dir=_memory()) as folder:
            target = made(name, Path(folder).resolve(), bundle)
            if replay:
                target.placed.whole = kept_files(replay, target.placed.whole)
            findings = fuzzed(
                target,
                seed,
                inputs=0 if replay else None if minutes else inputs or target.inputs,
                seconds=minutes and minutes * 60,
            )
            click.echo(_line(name, seed, findings))
            for finding in findings.found:
                click.echo(f"  {finding.what}\n    {finding.where}")
                if not replay:
                    click.echo(f"    kept in {keep(target, finding, seed, place)}")
        told[name] = {
            "inputs": findings.inputs,
            "seconds": round(findings.seconds, 2),
            "outcomes": findings.outcomes,
            "findings": [finding.what for finding in findings.found],
        }
    if json_file:
        json_file.write_text(json.dumps({"seed": seed, "targets": told}, indent=1) + "\n")
    sys.exit(any(one["findings"] for one in told.values()))


def _memory() -> Path | None:
    """Return a folder in memory, if there is one: files are written for every input."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else None


def _line(name: str, seed: int, findings: Findings) -> str:
    rate = findings.inputs / max(findings.seconds, 1e-9)
    outcomes = ", ".join(f"{count} {what}" for what, count in findings.outcomes.most_common())
    return (
        f"{name}: {findings.inputs} inputs of seed {seed} in {findings.seconds:.1f} s, "
        f"{rate:.0f}/s; {len(findings.found)} findings ({outcomes})"
    )


if __name__ == "__main__":
    main()
