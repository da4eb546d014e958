"""The files that a reader is given: whole ones, and what somebody put in their place."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Content", "Files", "Odd", "Placed"]


@dataclass(frozen=True)
class Odd:
    """Something that stands where a file should, and is none.

    Attributes:
        kind: of the thing.
        to: where a link leads.
    """

    kind: Literal["link", "folder", "pipe"]
    to: str = ""


Content = bytes | Odd

# By path below a folder, with `/`.
Files = dict[str, Content]


class Placed:
    """A folder with whole files, in which some can be others for a while.

    Attributes:
        folder: their place.
        whole: what it holds at first.
    """

    def __init__(self, folder: Path, whole: Files) -> None:
        self.folder, self.whole = folder, whole
        self._held: Files = {}
        self.place(whole)

    def place(self, files: Files) -> None:
        """Have the folder hold `files`, of those that it ever held, and no others."""
        for name in self._held.keys() | files.keys():
            if self._held.get(name) is not files.get(name):
                self._put(self.folder / name, files.get(name))
        self._held = dict(files)

    def renew(self) -> None:
        """Have the folder hold whole files only, whatever another process has left in it."""
        shutil.rmtree(self.folder)
        self._held = {}
        self.place(self.whole)

    @staticmethod
    def _put(path: Path, content: Content | None) -> None:
        # A new file each time: what has an old one mapped keeps it as it was.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if content is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case bytes():
                path.write_bytes(content)
            case Odd("link", to):
                path.symlink_to(to)
            case Odd("folder"):
                path.mkdir()
            case Odd("pipe"):
                os.mkfifo(path)
