"""Hold llama.cpp, on the files of `export-weights`, to what the original computed.

    python benchmarks/peers/llama_goldens.py --llama-python python

For each fixture model of the tests: the model as GGUF, split, in every dtype that it fits into;
llama.cpp's logits for a prompt, by its defaults, and their distance from those of the original
program in float32. What that makes of it in bfloat16 says how far a model lets roundings grow.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

from export_grok.errors import ConfigError
from export_grok.export.weights_to.export import plan_export
from export_grok.export.weights_to.options import WEIGHT_DTYPES, WeightDtype, WeightsOptions

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
PROGRAM = Path(__file__).with_name("llama_logits.py")


@click.command()
@click.option("--llama-python", default=sys.executable, help="Interpreter with llama-cpp-python.")
def main(llama_python: str) -> None:
    """Print a table: relative error of the logits, share of tokens with the same best next one."""
    click.echo("| model | computed by | relative error | same best token |\n|---|---|---:|---:|")
    for model in ("tiny", "tiny8", "deep13"):
        with np.load(DATA / model / "goldens.npz") as goldens:
            tokens, right = goldens["tokens"][0], goldens["f32/prefill_logits"][0]
            click.echo(
                row(model, "the original in bfloat16", goldens["bf16/prefill_logits"][0], right)
            )
        for dtype in WEIGHT_DTYPES:
            try:
                found = llama_logits(DATA / model, dtype, tokens, llama_python)
            except ConfigError:
                continue  # groups of rows that blocks of 32 do not fit into
            click.echo(row(model, f"llama.cpp, {dtype}", found, right))


def row(model: str, what: str, found: np.ndarray, right: np.ndarray) -> str:
    """Return a line of the table for logits [S, V]."""
    error = np.linalg.norm(found - right) / np.linalg.norm(right)
    same = (found.argmax(axis=-1) == right.argmax(axis=-1)).mean()
    return f"| {model} | {what} | {error:.1e} | {same:.0%} |"


def llama_logits(
    checkpoint: Path, dtype: WeightDtype, tokens: np.ndarray, python: str
) -> np.ndarray:
    """Return the logits of llama.cpp, [S, V]."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = WeightsOptions(to="gguf", dtype=dtype, split=True)
        plan = plan_export(checkpoint, folder / "gguf", options)
        plan.folder.write()
        np.save(folder / "tokens.npy", tokens)
        files = (plan.folder.path / plan.folder.files[-1].name, "tokens.npy", "logits.npy")
        command = [python, str(PROGRAM), *map(str, files)]
        subprocess.run(command, cwd=folder, capture_output=True, check=True)
        return np.load(folder / "logits.npy")


if __name__ == "__main__":
    main()
