"""Make the graphs of all layers for ranks, without packing their weights, and drop them.

    python benchmarks/rank_graphs.py BUNDLE --tp 8

BUNDLE is a folder of graphs or an engine: what the whole model's graphs are, and where its weights
lie. The graphs are traced with a rank's share, stamped, cut where ranks are summed, lowered, and
written to a temporary folder.
"""

import tempfile
from pathlib import Path

import click
from stages import told_in_a_line

from export_grok.artifacts import RANK_GRAPHS, open_bundle
from export_grok.engines.ort.lower import lower_graph
from export_grok.engines.ort.parts import rank_parts
from export_grok.export.graphs import write_graph
from export_grok.export.head import head_index
from export_grok.export.rank_weights import rank_index


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--tp", default=8, show_default=True, help="Ranks.")
@told_in_a_line()
def main(folder: Path, tp: int) -> None:
    """Make the ranks' graphs of the bundle in FOLDER, and count them."""
    bundle = open_bundle(folder)
    index = bundle.index()
    head = head_index(bundle.config, folder) if bundle.manifest.head == "int8" else index
    planned = rank_index(bundle.config, index, head, folder, tp)
    count = nbytes = 0
    with tempfile.TemporaryDirectory() as place:
        Path(place, RANK_GRAPHS).mkdir()
        for models in rank_parts(bundle, planned, tp):
            for name, model in models.items():
                for path, lowered in (
                    (Path(place, name), False),
                    (Path(place, f"{name}.l"), True),
                ):
                    if lowered:
                        lower_graph(model, dtype=bundle.manifest.dtype)
                    write_graph(model, path)
                    count, nbytes = count + 1, nbytes + path.stat().st_size
    click.echo(
        f"{count} graphs of {bundle.config.num_layers} layers for {tp} ranks, {nbytes:,} bytes"
    )


if __name__ == "__main__":
    main()
