"""Take full-size layers of Grok-1, random int8, from released files to decoded tokens.

    python benchmarks/full_layer.py DIR [--layers 1] [--decode 4] [--against-torch]

Writes a checkpoint of that many layers into DIR (4.9 GB each, and 3.2 GB of embedding), runs every
stage as a user would, and prints a line for each with its time and the peak of its memory. A store
of the same length is written too, checked and removed.
"""

import shutil
import sys
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from timed import timed

PROMPT_TOKENS = 4


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", default=1, show_default=True)
@click.option("--decode", "steps", default=4, show_default=True, help="Decode steps.")
@click.option("--against-torch", is_flag=True, help="Compare with the PyTorch model too.")
def main(folder: Path, layers: int, steps: int, against_torch: bool) -> None:
    """Run all stages at full layer size in FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    tokens, logits = folder / "tokens.npy", folder / "logits.npz"
    np.save(tokens, np.random.default_rng(0).integers(0, 131072, (1, PROMPT_TOKENS + steps)))
    if not checkpoint.exists():
        stand_in = str(Path(__file__).resolve().parent / "stand_in.py")
        command = [sys.executable, stand_in, str(folder), "--layers", str(layers)]
        timed("write checkpoint", command)
    program = [sys.executable, "-m", "export_grok"]
    timed("index", [*program, "index", str(checkpoint)])
    timed("check", [*program, "check", str(checkpoint)])
    store = folder / "store"
    timed("import", [*program, "import", str(checkpoint), str(store)])
    timed("check of the store", [*program, "check", str(store)])
    shutil.rmtree(store)
    timed("export", [*program, "export", str(checkpoint), "--out", str(engine)])
    timed("build-engine", [*program, "build-engine", str(engine)])
    command = ["logits", str(engine), "--tokens", str(tokens), "--out", str(logits)]
    timed(f"prefill {PROMPT_TOKENS + steps}", [*program, *command])
    whole = np.load(logits)["logits"]
    timed(f"prefill {PROMPT_TOKENS}, decode {steps}", [*program, *command, "--decode", str(steps)])
    stepped = np.load(logits)["logits"]
    difference = float(np.abs(whole - stepped).max())
    print(f"largest difference of the two runs' logits: {difference:.2e} of {whole.std():.2f} std")
    if against_torch:
        difference = float(np.abs(whole - _torch_logits(engine, np.load(tokens))).max())
        print(f"largest difference from the PyTorch model's: {difference:.2e}")


def _torch_logits(engine: Path, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    import torch

    from export_grok.artifacts import open_bundle
    from export_grok.export.kv_cache import KVCache
    from export_grok.export.load import model_from_index

    bundle = open_bundle(engine)
    model = model_from_index(bundle.config, bundle.index(), "float32")
    cache = KVCache.allocate(bundle.config, batch=1, length=tokens.shape[1], dtype="float32")
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens), torch.zeros(1, dtype=torch.int64), cache)
    array: NDArray[np.float32] = logits.numpy()
    return array


if __name__ == "__main__":
    main()
