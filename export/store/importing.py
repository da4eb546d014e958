"""The stage from weights in any layout to a store that says what it was made from.

A store is half made from its plan, `.import.json`, which is written before anything is changed,
to its manifest, `store.json`, which is written last; in between `open_weights` refuses it. Each
file names its plan in its header, so that none is taken for one of another import. Broken off
anywhere and run again, an import keeps the files that are whole and writes the others.
"""

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_grok.errors import CheckpointError, OutputError
from export_grok.export.index_source import IndexSource
from export_grok.export.needs import COPY_RATE
from export_grok.export.store.file import StoreFile
from export_grok.export.store.folder import (
    IMPORT_PLAN,
    STORE_MANIFEST,
    default_workers,
    store_plan,
    write_store,
)
from export_grok.export.store.manifest import StoreManifest
from export_grok.export.store.plan import check_apart, plan_id, plan_of, takes_over
from export_grok.export.tensor_source import TensorSource
from export_grok.export.tokenizer_file import copy_tokenizer
from export_grok.files import output_errors, write_json
from export_grok.needs import Disk, Needs, room_of

__all__ = ["Import", "planned_import"]

# Files of a store, and what a killed run has left of one.
_STORE_FILE = re.compile(
    r"(embedding|layer_\d+)\.safetensors|\.(embedding|layer_\d+)\..*\.partial"
)

# What the program itself takes, and a thread with its blocks; measured at full size.
PROGRAM_BYTES = 60_000_000
WORKER_BYTES = 30_000_000
# What two cores make int8 of.
QUANTISED_PER_SECOND = 150e6


@dataclass(frozen=True, kw_only=True)
class Import:
    """An import that can begin; nothing was written yet.

    Attributes:
        source: of the tensors.
        out: folder of the store.
        plan: what the store is made of, see `export.store.plan`.
        kept: files that are there, whole.
        missing: files that will be written.
        done: whether there is nothing to do.
    """

    source: TensorSource
    out: Path
    plan: dict[str, Any]
    kept: tuple[StoreFile, ...]
    missing: tuple[StoreFile, ...]
    done: bool

    @property
    def total(self) -> int:
        """Length of all tensors of the store."""
        return self.nbytes + sum(file.nbytes for file in self.kept)

    @property
    def nbytes(self) -> int:
        """Length of the tensors that will be written."""
        return sum(file.nbytes for file in self.missing)

    def needs(self, workers: int | None = None) -> Needs:
        """Return what it takes.

        Args:
            workers: threads that will write a file each.

        Raises:
            OSError: the files cannot be asked for their size.
        """
        if self.done:
            return Needs()
        room = sum(file.room(self.source.root) for file in self.missing)
        freed = sum(room_of(path) for path in self._leftover())
        copied = isinstance(self.source, IndexSource)
        held = WORKER_BYTES + (0 if copied else _largest_matrix(self.missing))
        return Needs(
            disk=(Disk(folder=self.out, nbytes=max(0, room - freed)),),
            memory=PROGRAM_BYTES + held * min(workers or default_workers(), len(self.missing)),
            seconds=self.nbytes / (COPY_RATE if copied else QUANTISED_PER_SECOND),
        )

    def run(
        self,
        *,
        workers: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> StoreManifest:
        """Write what is missing, and return what the store holds then.

        Args:
            workers: threads that write a file each; None for `store.default_workers`.
            progress: takes how many bytes of tensors were written or kept since its last call.

        Raises:
            CheckpointError: a source file cannot be read to its end, or was changed meanwhile.
            OutputError: the store cannot be written, or another import is writing it. What was
                written stays, and is kept by the next run.
        """
        with output_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        with _alone(self.out):
            if not self.done:
                self._begin()
                copy_tokenizer(self.source.root, self.out)
                write_store(
                    self.source,
                    self.out,
                    plan=plan_id(self.plan),
                    resume=True,
                    workers=workers,
                    progress=progress,
                )
                self._check_unchanged()
            manifest = StoreManifest.of(self.source, plan_id(self.plan), self.out)
            if not self.done:
                manifest.write(self.out)
            with output_errors(self.out):
                (self.out / IMPORT_PLAN).unlink(missing_ok=True)
        return manifest

    def _begin(self) -> None:
        # In this order: with a manifest the store counts as whole, and it still is.
        write_json(self.out / IMPORT_PLAN, self.plan)
        with output_errors(self.out):
            (self.out / STORE_MANIFEST).unlink(missing_ok=True)
            for path in self._leftover():
                path.unlink()

    def _check_unchanged(self) -> None:
        """Hold the source to its plan once more: hours may have passed."""
        if plan_of(self.source) == self.plan:
            return
        with output_errors(self.out):
            for file in self.missing:
                (self.out / file.name).unlink()
        raise CheckpointError(
            f"{self.source.root} was changed while it was read, and what was written of it is "
            "removed; import it again, with --overwrite"
        )

    def _leftover(self) -> list[Path]:
        """Return the files in the folder that are a store's and not of this plan, or not whole."""
        if not self.out.is_dir():
            return []
        kept = {file.name for file in self.kept}
        return [
            path
            for path in self.out.iterdir()
            if _STORE_FILE.fullmatch(path.name) and path.name not in kept
        ]


def planned_import(source: TensorSource, out: Path, *, overwrite: bool = False) -> Import:
    """Return the import of the tensors of `source` into the folder `out`, checked.

    A store that was made of the same is kept, and a half-made one goes on.

    Args:
        source: of the tensors.
        out: folder of the store, there or not.
        overwrite: replace a store that was made of something else, or is whole.

    Raises:
        BundleError: `out` holds another store or something else, or is the source itself.
        CheckpointError: a source file cannot be read.
        OutputError: `out` cannot be looked at.
    """
    check_apart(source, out)
    plan = plan_of(source)
    with output_errors(out):
        ours = takes_over(out, plan, overwrite=overwrite)
    files = store_plan(source, plan_id(plan))
    kept = [file for file in files if ours and file.facts_in(out / file.name)]
    return Import(
        source=source,
        out=out,
        plan=plan,
        kept=tuple(kept),
        missing=tuple(file for file in files if file not in kept),
        done=len(kept) == len(files) and _is_told(source, plan, out),
    )


def _is_told(source: TensorSource, plan: dict[str, Any], out: Path) -> bool:
    """Return whether the store's manifest says what the headers of its files do."""
    try:
        held = StoreManifest.read(out)
    except CheckpointError:
        return False
    return held is not None and held == StoreManifest.of(source, plan_id(plan), out)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep other imports out of the folder while the block runs; the system forgets it with us."""
    with output_errors(out):
        folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another import is writing {out}; wait for it, or choose another folder"
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(folder)


def _largest_matrix(files: Iterable[StoreFile]) -> int:
    """Return the bytes of the largest int8 matrix, of one expert; one is made at a time."""
    return max(
        (
            math.prod(parameter.shape[-2:])
            for file in files
            for parameter in file.parameters.values()
            if parameter.dtype == "int8"
        ),
        default=0,
    )
