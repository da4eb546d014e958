"""Weights in any layout that is known, as a source of tensors in ours."""

from pathlib import Path

from export_grok.config import GrokConfig
from export_grok.errors import ConfigError
from export_grok.export.checkpoint import holds_weights, open_weights
from export_grok.export.index_source import IndexSource
from export_grok.export.layouts import foreign_source
from export_grok.export.tensor_source import TensorSource

__all__ = ["open_source"]


def open_source(
    path: Path,
    config: GrokConfig | None = None,
    layers: int | None = None,
    groups: int | None = None,
) -> TensorSource:
    """Return the tensors of the weights in `path`, checked by the headers of their files.

    Args:
        path: folder of a released checkpoint, a store, or weights in a foreign layout.
        config: of the whole; without it that of a `config.json` with the weights, else Grok-1's.
        layers: only the first so many.
        groups: of rows with scales of their own, in the matrices that are cut by rows. Weights
            that are quantised here get so many, others must have them.

    Raises:
        CheckpointError: files are missing, damaged, or of no known layout.
        ConfigError: the config cannot be read or is not that of the weights.
        UnsafePickleError: files ask for something that is no array.
    """
    if not holds_weights(path):
        return foreign_source(path, config, layers, groups)
    found, index = open_weights(path, config, layers)
    if groups not in (None, found.row_parallel_scale_groups):
        raise ConfigError(
            f"{path} is int8 already, with {found.row_parallel_scale_groups} groups of rows, not "
            f"{groups}: leave --groups away"
        )
    return IndexSource(found, index)
