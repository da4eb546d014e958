"""Weights to others: planned and checked first, then written; broken off, it goes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_grok.config import GrokConfig
from export_grok.export.weights_to.folder import Folder, open_folder
from export_grok.export.weights_to.gguf import check_gguf, gguf_files
from export_grok.export.weights_to.hf import hf_files
from export_grok.export.weights_to.hf_config import differences
from export_grok.export.weights_to.options import Naming, WeightDtype, WeightsOptions
from export_grok.export.weights_to.plan import PlannedFile
from export_grok.export.weights_to.source import Source, open_source_of_weights
from export_grok.export.weights_to.values import check_scales, memory_needed
from export_grok.needs import Disk, Needs

__all__ = ["WeightsExport", "plan_export"]

# Bytes that are turned, rounded and written in a second by one core.
RATE = 300e6
LONGEST_FILE = 50 * 10**9
NAMES: Naming = "hpcai"


@dataclass(frozen=True, kw_only=True)
class WeightsExport:
    """What is to be written, and where.

    Attributes:
        folder: with the files; its `write` writes them.
        notes: what is lost, or what others will make of it otherwise than we do.
    """

    source: Source
    folder: Folder
    notes: tuple[str, ...]

    @property
    def needs(self) -> Needs:
        """What writing it takes."""
        nbytes = self.folder.nbytes_to_write
        return Needs(
            disk=(Disk(folder=self.folder.path, nbytes=nbytes),),
            memory=memory_needed(self.source.config),
            seconds=nbytes / RATE,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what there is once it is written, for JSON."""
        return {
            "source": str(self.source.folder),
            "out": str(self.folder.path),
            "files": {file.name: file.nbytes for file in self.folder.files},
            "kept": sorted(self.folder.kept),
            "notes": list(self.notes),
        }


def plan_export(
    source: Path,
    out: Path,
    options: WeightsOptions,
    *,
    config: GrokConfig | None = None,
    layers: int | None = None,
    overwrite: bool = False,
) -> WeightsExport:
    """Return what is to be written, once everything that can be checked before was.

    Args:
        source: folder of a checkpoint, a store, or a bundle.
        out: folder to write. The files of an earlier call that was broken off are kept.
        options: the format.
        config: of a checkpoint, if it has no `config.json` and is not Grok-1.
        layers: only the first so many.
        overwrite: replace what `out` holds of another export.

    Raises:
        BundleError: the bundle is damaged.
        CheckpointError: the weights or the tokenizer are damaged, or beyond the dtype.
        ConfigError: the model cannot be said in this format.
        OutputError: `out` holds something else.
    """
    found = open_source_of_weights(source, config, layers)
    dtype: WeightDtype = options.dtype or ("bfloat16" if options.to == "hf" else "int8")
    if options.to == "gguf":
        check_gguf(found.config, dtype, options.head)
    lost = check_scales(found.index, dtype)
    notes = () if options.to == "gguf" else differences(found.config, options.names or NAMES)
    if lost:
        notes = (f"scales lose up to {lost:.2%} of their value in Q8_0's float16", *notes)
    files = _files(found, options, dtype)
    return WeightsExport(
        source=found, folder=open_folder(out, files, overwrite=overwrite), notes=notes
    )


def _files(source: Source, options: WeightsOptions, dtype: WeightDtype) -> list[PlannedFile]:
    identity = source.identity()
    if options.to == "hf":
        assert dtype != "int8"
        return hf_files(
            source.config,
            source.index,
            names=options.names or NAMES,
            dtype=dtype,
            identity=identity,
            tokenizer=source.tokenizer,
        )

    def files(split: bool) -> list[PlannedFile]:
        return gguf_files(
            source.config,
            source.index,
            name="model",
            dtype=dtype,
            head=options.head,
            split=split,
            identity=identity,
            tokenizer=source.tokenizer,
        )

    if options.split is not None:
        return files(options.split)
    whole = files(False)
    return files(True) if whole[0].nbytes > LONGEST_FILE else whole
