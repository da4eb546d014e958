"""Write what stands in for the released files of Grok-1: sparse, or of a few random layers.

    python benchmarks/stand_in.py DIR              770 files, 318 GB, some MB on disk: all zeros
    python benchmarks/stand_in.py DIR --layers 2   2 layers of random weights, 13 GB on disk

Names, lengths and pickled headers are those of the release (`export.released_layout`), so every
stage that reads no weights works as on the real files. DIR gets `ckpt-0` and `config.json`.
"""

import dataclasses
from collections import Counter
from pathlib import Path

import click
from stages import made_checkpoint, told_in_a_line

from export_grok.config import GROK_1, GrokConfig
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.export.released_layout import write_released
from export_grok.files import new_folder, write_json

__all__ = ["write_sparse"]


def write_sparse(config: GrokConfig, out: Path) -> None:
    """Write a checkpoint of zeros that takes no room on the disk.

    Raises:
        OutputError: `out` cannot be written, or holds something.
    """
    with new_folder(out):
        (out / RELEASED_FOLDER).mkdir()
        for name, arrays in released_files(config).items():
            write_released(out / RELEASED_FOLDER / name, arrays, None)
        write_json(out / "config.json", config.to_dict())


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(1, 64), help="Random layers. [default: 64 of zeros]")
@told_in_a_line()
def main(folder: Path, layers: int | None) -> None:
    """Write FOLDER/checkpoint if it is not there, and count its files by length."""
    if layers is None:
        checkpoint = folder / "checkpoint"
        if not checkpoint.exists():
            write_sparse(GROK_1, checkpoint)
    else:
        config = dataclasses.replace(GROK_1, num_layers=layers)
        checkpoint = made_checkpoint(folder, config, write_random_checkpoint, engines=0)
    files = [path.stat() for path in (checkpoint / RELEASED_FOLDER).iterdir()]
    for length, count in sorted(Counter(file.st_size for file in files).items(), reverse=True):
        click.echo(f"{count:5} files of {length:>13,} bytes")
    total, held = sum(file.st_size for file in files), 512 * sum(file.st_blocks for file in files)
    click.echo(f"{len(files)} files, {total:,} bytes, {held / 1e6:,.0f} MB on disk: {checkpoint}")


if __name__ == "__main__":
    main()
