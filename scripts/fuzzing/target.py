"""One thing to be fuzzed: a reader, whole files for it, and how they are made wrong."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from export_grok.errors import ExportGrokError
from scripts.fuzzing.files import Files, Placed

__all__ = ["Case", "Target"]


@dataclass(frozen=True)
class Case:
    """One wrong input: made again from these numbers alone.

    Attributes:
        number: counts the inputs of a run.
        edits: the seed of each edit, in their order.
    """

    number: int
    edits: tuple[int, ...]

    @classmethod
    def of(cls, seed: int, number: int) -> "Case":
        """Return input `number` of the run with this seed."""
        random = Random(f"{seed} {number}")
        count = random.choice((1, 1, 1, 2, 2, 3, 5))
        return cls(number, tuple(random.getrandbits(32) for _ in range(count)))


class Target(ABC):
    """A reader and its files.

    Attributes:
        name: that the program knows it by.
        inputs: how many of them a test takes.
        spare: bytes that one input may take beyond what the process has.
        placed: the files, in a folder of their own.
        beside: another folder that it may read.
    """

    name: ClassVar[str]
    inputs: ClassVar[int] = 1000
    spare: ClassVar[int] = 64 << 20
    placed: Placed
    beside: Path | None = None

    @abstractmethod
    def edit(self, files: Files, random: Random) -> None:
        """Make one thing about the files wrong, in place."""

    @abstractmethod
    def read(self) -> Any:
        """Return what the reader makes of the files in the folder.

        Raises:
            ExportGrokError: it refuses them.
        """

    @abstractmethod
    def hold(self, said: Any) -> None:
        """Hold what the reader said to the files.

        Raises:
            AssertionError: they hold something else.
        """

    def told(self, error: ExportGrokError) -> bool:
        """Return whether an error says where what is wrong is."""
        return str(self.folder) in str(error)

    def leave(self) -> None:
        """Look, and clean, whatever came of the last input.

        Raises:
            AssertionError: something was done that nobody may do.
        """
        return

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return self.placed.folder

    def files_of(self, case: Case) -> Files:
        """Return the files of one input."""
        files = dict(self.placed.whole)
        for seed in case.edits:
            self.edit(files, Random(seed))
        return files
