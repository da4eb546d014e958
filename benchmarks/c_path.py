"""Measure what a token costs more by the C library than by Python's own loop.

    python benchmarks/c_path.py DIR [--rounds 40] [--tokens 200] [--json FILE]

The demo model, made in DIR, answers the same prompt in a C program and here, by turns, in a new
order each round. It takes a minute. Measure on a machine that does nothing else.
"""

import statistics
import subprocess
from pathlib import Path
from time import perf_counter
from typing import IO

import click
from stages import run_stage, told_in_a_line

from export_grok.files import write_json
from export_grok.runtime import GenerationParams, Model, load

FILE = click.Path(path_type=Path)
PROMPT = "The lamp"  # c_path.c has it too
WARM = 3


@click.command()
@click.argument("folder", metavar="DIR", type=FILE)
@click.option("--rounds", default=40, show_default=True, help="Answers of each.")
@click.option("--tokens", default=200, show_default=True, help="Of an answer.")
@click.option("--json", "json_file", type=FILE, help="File for every sample.")
def main(folder: Path, rounds: int, tokens: int, json_file: Path | None) -> None:
    """Measure on the demo model in DIR."""
    with told_in_a_line():
        engine, program = _engine(folder), _program(folder)
        samples: dict[str, list[float]] = {"Python": [], "C": []}
        command = [program, engine, str(tokens)]
        with (
            load(engine, batch=1) as model,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            for turn in range(WARM + rounds):
                for name in ("Python", "C")[:: 1 if turn % 2 else -1]:
                    seconds = (
                        _by_python(model, tokens)
                        if name == "Python"
                        else _by_c(process.stdin, process.stdout)
                    )
                    if turn >= WARM:
                        samples[name].append(1e6 * seconds / tokens)
            process.stdin.close()
        _tell(samples)
        if json_file:
            write_json(json_file, samples)


def _engine(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "checkpoint").exists():
        run_stage("demo-checkpoint", str(folder / "checkpoint"))
    run_stage("build-engine", str(folder / "checkpoint"), "--out", str(folder / "engine"))
    return folder / "engine"


def _program(folder: Path) -> Path:
    made, program = folder / "c_library", folder / "c_path"
    run_stage("c-library", "--out", str(made))
    source = Path(__file__).with_suffix(".c")
    lib = made / "lib"
    command = ["cc", "-std=c11", "-O2", source, f"-I{made / 'include'}", f"-L{lib}"]
    subprocess.run([*command, "-lexport_grok", f"-Wl,-rpath,{lib}", "-o", program], check=True)
    return program


def _by_python(model: Model, tokens: int) -> float:
    params = GenerationParams(max_new_tokens=tokens, ignore_eos=True)
    began = perf_counter()
    for _ in model.submit(PROMPT, params):
        pass
    return perf_counter() - began


def _by_c(commands: IO[str], answers: IO[str]) -> float:
    commands.write("\n")
    return float(answers.readline())


def _tell(samples: dict[str, list[float]]) -> None:
    for name, found in samples.items():
        low, middle, high = statistics.quantiles(found)
        click.echo(f"{name:8} {middle:8.1f} us for a token, half of them {low:.1f} to {high:.1f}")
    more = [c - python for c, python in zip(samples["C"], samples["Python"], strict=True)]
    low, middle, high = statistics.quantiles(more)
    click.echo(f"C more   {middle:8.1f} us, of rounds beside each other {low:.1f} to {high:.1f}")


if __name__ == "__main__":
    main()
