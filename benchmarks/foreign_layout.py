"""Time and memory of reading Grok-1 from the layout of others, quantised as it is read.

    python benchmarks/foreign_layout.py DIR

Writes one layer of full size into DIR, under hpcai's names as bfloat16 safetensors (9.8 GB),
unless it is there; then reads every tensor as `export-grok import` does, with two threads, and
writes nothing. The values are those of int8 weights, as in what others published.
"""

import dataclasses
import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import ml_dtypes
import numpy as np
from disk import drop_from_memory
from timed import timed

from export_grok.config import GROK_1
from export_grok.export.layouts import foreign_source
from export_grok.export.layouts.names import LAYOUTS, Place
from export_grok.export.parameters import model_parameters
from export_grok.files import atomic_file, write_json

THREADS = 2
# The table is read as it is, in no time; a short one makes this about matrices.
CONFIG = dataclasses.replace(GROK_1, num_layers=1, vocab_size=1024)
FILE = "model.safetensors"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--read", "reading", is_flag=True, hidden=True)
@click.option("--cold", is_flag=True, help="Take the file out of memory before it is read.")
def main(folder: Path, reading: bool, cold: bool) -> None:
    """Write one layer into FOLDER and read it."""
    if reading:
        read(folder)
        return
    if not (folder / FILE).exists():
        write(folder)
    if cold:
        drop_from_memory([folder / FILE])
    timed("read and quantised", [sys.executable, __file__, str(folder), "--read"])


def write(folder: Path) -> None:
    """Write the layer. The experts are alike: what they hold makes no difference here."""
    (hpcai, *_) = LAYOUTS
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model_parameters(CONFIG).items():
        part = name.removeprefix("layers.0.")
        layer = None if part == name else 0
        if part.startswith("experts.") and part.endswith(".weight"):
            for expert in range(CONFIG.num_experts):
                shapes[hpcai.name_of(Place(part, layer, expert))] = parameter.shape[:0:-1]
        elif not part.endswith(".scales"):
            shape = parameter.shape if part == "embedding.weight" else parameter.shape[::-1]
            shapes[hpcai.name_of(Place(part, layer))] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG.to_dict())
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, 1 << 22).astype(np.int8)
    with atomic_file(folder / FILE) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            columns = shape[-1]
            scales = random.uniform(1e-4, 3e-4, 64).astype(ml_dtypes.bfloat16).astype(np.float32)
            rows = codes[: codes.size // columns // 64 * 64 * columns].reshape(-1, columns)
            rows[:, 0] = 127
            block = (rows * np.resize(scales, len(rows))[:, None]).astype(ml_dtypes.bfloat16)
            content = block.view(np.uint8).reshape(-1).data
            for first in range(0, 2 * math.prod(shape), len(content)):
                file.write(content[: 2 * math.prod(shape) - first])


def read(folder: Path) -> None:
    """Take every block of every parameter, and print the rate."""
    source = foreign_source(folder)
    names = [name for name in model_parameters(source.config) if not name.endswith(".scales")]
    began, busy = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(THREADS) as pool:
        made = sum(pool.map(lambda name: sum(map(len, source.blocks(name))), names))
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    held = sum(source.files.values())
    print(
        f"{held / 1e9:.2f} GB of bfloat16 became {made / 1e9:.2f} GB in {seconds:.1f} s: "
        f"{held / seconds / 1e9:.2f} GB/s read ({busy:.1f} s of cores)"
    )
    print(source.error("layers.0.experts.up.weight"))


if __name__ == "__main__":
    main()
