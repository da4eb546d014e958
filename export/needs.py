"""What the stage from weights to graphs needs.

Bytes of files are counted. Speeds, and the memory of programs, were measured at full size, on the
machine of docs/scale.md and by its commands.
"""

from pathlib import Path
from typing import Final

from export_grok.artifacts import COPIED_WEIGHTS
from export_grok.export.head import ENTRIES, TABLE, head_index
from export_grok.export.index_source import IndexSource
from export_grok.export.plan import Plan
from export_grok.export.store.folder import store_plan
from export_grok.needs import Disk, Needs
from export_grok.weights import WeightIndex

__all__ = ["TRACE_MAPPED", "TRACE_MEMORY", "TRACE_SECONDS", "graph_needs"]

MB: Final = 10**6

# Export of one layer: 7.9 s, of 64 layers 10.0 s; 0.33 GB of its own, and torch is mapped.
TRACE_SECONDS: Final = 8.0
STAMP_SECONDS: Final = 0.03
TRACE_MEMORY: Final = 350 * MB
TRACE_MAPPED: Final = 700 * MB
GRAPH_FILE: Final = 15_000
# Bytes a second of weights that are copied, and of a table that becomes an int8 head.
COPY_RATE: Final = 400 * MB
HEAD_RATE: Final = 140 * MB


def graph_needs(plan: Plan, index: WeightIndex, out: Path) -> Needs:
    """Return what writing a folder of graphs takes.

    Args:
        plan: of the folder.
        index: of the weights they are made of.
        out: the folder.
    """
    config = plan.config
    lengths: dict[str, int] = {}  # of long files
    seconds = TRACE_SECONDS + STAMP_SECONDS * config.num_layers
    memory, mapped = TRACE_MEMORY, TRACE_MAPPED
    if plan.copied:
        store = store_plan(IndexSource(config, index))
        folder = out / COPIED_WEIGHTS
        missing = Disk.of_files(folder, {file.name: file.size for file in store})
        seconds += missing.nbytes / COPY_RATE
        lengths = {f"{COPIED_WEIGHTS}/{file.name}": file.room(index.root) for file in store}
    if plan.head == "int8":
        lengths |= head_index(config, out).files
        table = index[TABLE]
        seconds += table.nbytes / HEAD_RATE
        # Some rows as floats, twice: as they are, and as what int8 makes of them.
        memory += 2 * min(ENTRIES, config.vocab_size) * config.emb_size * 4
        mapped += index.files[table.file]
    graphs = Disk(folder=out, nbytes=GRAPH_FILE * (config.num_layers + 7))
    return Needs(
        disk=(graphs, Disk.of_files(out, lengths)), memory=memory, mapped=mapped, seconds=seconds
    )
