"""Hold every byte of every rank's weights in a bundle to the stored tensors.

After `export-grok build-engine CHECKPOINT --out BUNDLE --tp 8`:

    python benchmarks/shards.py BUNDLE
"""

from pathlib import Path

import click

from export_grok.artifacts import open_bundle
from export_grok.export.partition import cut_axis, part_of
from export_grok.weights import WeightIndex, WeightReader


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def shards(folder: Path) -> None:
    """Compare the shards in FOLDER with where its weights come from, one tensor at a time."""
    bundle = open_bundle(folder, kind="engine")
    ranks = int(bundle.manifest.engine.get("tensor_parallel", 1))
    if ranks == 1:
        raise click.UsageError(f"{folder} is for one rank: build it with --tp")
    rank = bundle.config.for_rank(ranks)
    source = bundle.index()
    parts = [
        WeightIndex.read(root / "weights.json", root=root)
        for root in (folder / f"rank_{number}" for number in range(ranks))
    ]
    compared = wrong = 0
    for weight in source:
        axis = cut_axis(weight.name, weight.shape, rank)
        whole = WeightReader(source.root).read(weight)  # mapped, and dropped again with it
        for number, part in enumerate(parts):
            piece = part_of(whole, axis, number, ranks)
            found = WeightReader(part.root).read(part[weight.name])
            compared += found.nbytes
            if found.tobytes() != piece.tobytes():
                wrong += 1
                print(f"{part.root.name}: {weight.name} differs")
    print(f"{len(source.weights)} tensors, {ranks} ranks, {compared:,} bytes: {wrong} differ")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    shards()
