"""Checkpoints of any size that take no room on the disk."""

from pathlib import Path

from export_grok.config import GrokConfig
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.released_layout import write_released
from export_grok.files import write_json

__all__ = ["sparse_checkpoint"]


def sparse_checkpoint(config: GrokConfig, folder: Path) -> Path:
    """Write the released files of a model of zeros, which are holes, and return their folder."""
    (folder / RELEASED_FOLDER).mkdir(parents=True)
    for name, arrays in released_files(config).items():
        write_released(folder / RELEASED_FOLDER / name, arrays, None)
    write_json(folder / "config.json", config.to_dict())
    return folder
