"""Grok-1 as others published it: names, shapes and files of theirs, read as tensors of ours."""

from export_grok.export.layouts.source import ForeignSource as ForeignSource
from export_grok.export.layouts.source import foreign_source as foreign_source
