"""What is broken off: a command that writes a folder, and what loads of that folder."""

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from export_grok.artifacts import open_bundle
from export_grok.cli import main
from export_grok.errors import BundleError
from export_grok.export.checkpoint import open_weights
from export_grok.export.store.manifest import StoreManifest

__all__ = ["Bundles", "Content", "Stores", "Work", "content_of"]

# Hash of every file, by path.
Content = dict[str, str]


def content_of(folder: Path) -> Content:
    """Return what a folder holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@dataclass(frozen=True, kw_only=True)
class Work(ABC):
    """A command, from a source to a folder.

    Attributes:
        name: that the program knows it by.
        command: words of the command line; OUT stands for the folder, in paths below it too.
        before: words of a command that has written the folder before, if it was there.
    """

    name: str
    command: Sequence[str]
    before: Sequence[str] = ()

    @abstractmethod
    def loaded(self, folder: Path) -> Content:
        """Return the files that a program works with which loads the folder.

        Raises:
            ExportGrokError: it does not load.
        """

    def first_of(self, content: Content) -> Content:
        """Return what of the files of a whole folder loads before all are there."""
        return content

    def content(self, folder: Path) -> Content:
        """Return what must be in a folder, whatever happened on the way."""
        return content_of(folder)

    def begin(self, out: Path) -> None:
        """Have the folder be as it is before the command."""
        if self.before:
            self._run(self.before, out, None)

    def run(self, out: Path, said: Path | None = None) -> int:
        """Run the command and return its exit code.

        Args:
            out: folder to write.
            said: file for what it says of an error.
        """
        return self._run(self.command, out, said)

    @staticmethod
    def _run(words: Sequence[str], out: Path, said: Path | None) -> int:
        filled = [f"{out}{word[3:]}" if word.split("/")[0] == "OUT" else word for word in words]
        with (
            open(said or os.devnull, "w") as errors,
            open(os.devnull, "w") as printed,
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(printed),
        ):
            try:
                main(filled)
            except SystemExit as done:
                return int(done.code or 0)


class Bundles(Work):
    """A command that writes a bundle."""

    def loaded(self, folder: Path) -> Content:
        """Return the hashes of what the manifest names."""
        manifest = open_bundle(folder).manifest
        content = content_of(folder)
        copied = manifest.weight_files if manifest.weights.copied else {}
        return {name: content[name] for name in (*manifest.files, *copied)}

    def first_of(self, content: Content) -> Content:
        """Return the graphs: they are whole before there is an engine."""
        return {
            name: value
            for name, value in content.items()
            if not name.startswith(("rank_", "ranks/")) and ".ort." not in name
        }


class Stores(Work):
    """A command that writes a store."""

    def loaded(self, folder: Path) -> Content:
        """Return the hashes of what is indexed, and of the manifest, without which it is none."""
        _, index = open_weights(folder)
        if StoreManifest.read(folder) is None:
            raise BundleError(f"{folder} has no manifest")
        content = content_of(folder)
        return {name: content[name] for name in (*index.files, "store.json", "config.json")}
