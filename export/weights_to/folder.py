"""The folder that weights are written into: what it holds of them is kept, all else refused."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from export_grok.errors import OutputError
from export_grok.export.weights_to.plan import PlannedFile
from export_grok.files import output_errors
from export_grok.progress import progress_bar

__all__ = ["Folder", "open_folder"]

# What an export of any kind writes.
_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.(safetensors|gguf)|model\.safetensors\.index\.json"
    r"|config\.json|tokenizer\.model"
)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder and what is to be in it.

    Attributes:
        files: all of them, in the order in which they are written: readers begin with the last.
        kept: names of those that are there, whole.
        replaced: files of another export, which are removed.
    """

    path: Path
    files: Sequence[PlannedFile]
    kept: frozenset[str]
    replaced: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def nbytes_to_write(self) -> int:
        """Bytes that are still to be written, less those of the files that are removed."""
        new = sum(file.nbytes for file in self.files if file.name not in self.kept)
        return max(0, new - sum(path.stat().st_size for path in self.replaced))

    def write(self) -> None:
        """Write what is missing, each file whole or not at all.

        Raises:
            CheckpointError: a tensor cannot be read, or has a value that its dtype has not.
            OutputError: the folder cannot be written. What is whole stays for the next call.
        """
        with output_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # Before the first new file is there: one export's are never read with another's.
            for path in self.replaced:
                path.unlink()
        with progress_bar("writing", self.nbytes, unit="bytes") as advance:
            for file in self.files:
                if file.name in self.kept:
                    advance(file.nbytes)
                else:
                    file.write(self.path / file.name, advance)


def open_folder(path: Path, files: Sequence[PlannedFile], *, overwrite: bool) -> Folder:
    """Return the folder `path`, with those of `files` that are there already.

    Args:
        path: which need not be there.
        files: that are to be in it.
        overwrite: replace the files of another export.

    Raises:
        OutputError: it holds another export, or anything else.
    """
    planned = {file.name: file for file in files}
    with output_errors(path):
        there = sorted(path.iterdir()) if path.exists() else []
    # A file that was begun has a dot before its name.
    found = [place for place in there if not place.name.startswith(".")]
    foreign = [place.name for place in found if not _OURS.fullmatch(place.name)]
    if foreign:
        raise OutputError(
            f"{path} holds {foreign[0]}, no file of exported weights; choose another --out"
        )
    kept = frozenset(
        place.name
        for place in found
        if place.name in planned and planned[place.name].is_whole(place)
    )
    replaced = [place for place in found if place.name not in kept]
    if replaced and not overwrite:
        raise OutputError(
            f"{path} holds {replaced[0].name} of another export; choose another --out, or replace "
            "it with --overwrite"
        )
    return Folder(path=path, files=files, kept=kept, replaced=tuple(replaced))
