"""A checkpoint as safetensors files, one a layer: the same bytes, page-aligned for mapping.

config.json
embedding.safetensors    embedding.weight, final_norm.scale
layer_00.safetensors     layers.0.experts.gate.weight, ...
store.json               if it was imported: what it holds and was made from; written last

What the header of a file says is in `export.store.file`.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.index_source import IndexSource, reading
from export_grok.export.parameters import Parameter, layer_parameters, model_parameters
from export_grok.export.store.file import Facts, StoreFile
from export_grok.export.store.target import Origin, StoreTarget
from export_grok.files import atomic_file, output_errors, write_json
from export_grok.machine import this_machine
from export_grok.weights import Weight, WeightIndex

if TYPE_CHECKING:
    from export_grok.export.tensor_source import TensorSource

__all__ = [
    "IMPORT_PLAN",
    "STORE_MANIFEST",
    "default_workers",
    "is_half_made",
    "store_files",
    "store_plan",
    "write_store",
]

STORE_MANIFEST = "store.json"
# Stands in a store from before its first change to after its manifest.
IMPORT_PLAN = ".import.json"

# More than the disks of most machines feed.
MOST_WORKERS = 4


def store_files(config: GrokConfig) -> dict[str, dict[str, Parameter]]:
    """Return what each file of a store holds: parameters by name, by file name."""
    layers = {
        f"layer_{layer:02}.safetensors": layer_parameters(config, layer)
        for layer in range(config.num_layers)
    }
    in_layers = {name for parameters in layers.values() for name in parameters}
    rest = {n: p for n, p in model_parameters(config).items() if n not in in_layers}
    return {"embedding.safetensors": rest, **layers}


def is_half_made(folder: Path) -> bool:
    """Return whether `folder` is a store whose import was broken off, or is still running."""
    return (folder / IMPORT_PLAN).exists() and not (folder / STORE_MANIFEST).exists()


def store_plan(source: "TensorSource", plan: str = "") -> list[StoreFile]:
    """Return the files of a store with the tensors of `source`, in the order they are written.

    Args:
        source: of the tensors.
        plan: what their headers say they are made by.
    """
    planned = []
    for name, parameters in store_files(source.config).items():
        origins = sorted({file for each in parameters for file in source.origins(each)})
        planned.append(
            StoreFile(
                name=name,
                parameters=parameters,
                config=source.config,
                plan=plan,
                source={file: source.files[file] for file in origins},
            )
        )
    return planned


def write_store(
    source: "TensorSource",
    out: Path,
    *,
    plan: str = "",
    resume: bool = False,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> WeightIndex:
    """Write the tensors of `source` as a store and return the index of the store.

    They pass in blocks, and are hashed as they pass. Every file appears whole, or not at all.

    Args:
        source: of the tensors.
        out: folder, made if it is not there.
        plan: of the import; a file of another one is not kept.
        resume: keep the files that an earlier call for the same plan and source has written.
        workers: threads that write a file each; None for `default_workers`.
        progress: takes how many bytes of weights were written, or found, since its last call. It
            is called by several threads.

    Raises:
        CheckpointError: a source file cannot be read to the end of a tensor.
        OutputError: `out` cannot be written.
    """
    with output_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", source.config.to_dict())
    files = store_plan(source, plan)
    writer = _Writer(source, out, progress)
    missing = [file for file in files if not (resume and writer.keeps(file))]
    writer.write(missing, workers or default_workers())
    return WeightIndex(
        root=out,
        weights={name: weight for file in files for name, weight in file.weights.items()},
        files={file.name: file.size for file in files},
    )


def default_workers() -> int:
    """Return how many threads write a store: one waits for the disk while another hashes."""
    return max(2, min(this_machine().cores, MOST_WORKERS))


class _Writer:
    """Writes files of a store, several at once."""

    def __init__(self, source: "TensorSource", out: Path, progress: Callable[[int], None]) -> None:
        self._source = source
        self._out = out
        self._progress = progress
        self._source_hashes: dict[str, str] = {}
        self._stopped = threading.Event()

    def keeps(self, file: StoreFile) -> bool:
        """Return whether the file is there already."""
        facts = file.facts_in(self._out / file.name)
        if facts is None:
            return False
        self._source_hashes |= facts.source
        self._progress(file.nbytes)
        return True

    def write(self, files: list[StoreFile], workers: int) -> None:
        with ThreadPoolExecutor(workers) as pool:
            try:
                writing = [pool.submit(self._write, file) for file in files]
                for done in as_completed(writing):
                    done.result()
            except BaseException:  # Ctrl-C too: the others stop at their next block
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _write(self, file: StoreFile) -> None:
        path = self._out / file.name
        with atomic_file(path) as opened:
            target = StoreTarget(opened, path, file.size)
            tensors = {name: self._copied(weight, target) for name, weight in file.weights.items()}
            facts = Facts(
                tensors=tensors, source=self._hashes_of(file), errors=self._errors_of(file)
            )
            target.write(memoryview(file.header(facts)), 0)

    def _copied(self, weight: Weight, target: StoreTarget) -> str:
        """Write a tensor and return its hash."""
        digest = hashlib.sha256()
        done = 0
        with self._origin(weight.name) as origin:
            for block in self._source.blocks(weight.name):
                if self._stopped.is_set():
                    raise CancelledError
                data = memoryview(block).cast("B")
                digest.update(data)
                at, done = done, done + len(data)
                if done > weight.nbytes:
                    break
                there = origin and Origin(origin.file, origin.offset + at)
                target.write(data, weight.offset + at, there)
                self._progress(len(data))
        if done != weight.nbytes:
            raise CheckpointError(
                f"{weight.name} came with {done} bytes; {weight.nbytes} are needed: the files in "
                f"{self._source.root} were changed while they were read, or are damaged"
            )
        return digest.hexdigest()

    @contextlib.contextmanager
    def _origin(self, name: str) -> Iterator[Origin | None]:
        """Yield where a tensor lies, if it lies in a file as it is written."""
        if not isinstance(self._source, IndexSource):
            yield None
            return
        weight = self._source.index[name]
        with reading(self._source.root / weight.file) as file:
            yield Origin(file, weight.offset)

    def _hashes_of(self, file: StoreFile) -> dict[str, str]:
        """Return the hash of each of the file's source files."""
        unknown = [
            name
            for name in file.parameters
            if any(origin not in self._source_hashes for origin in self._source.origins(name))
        ]
        self._source_hashes |= self._source.sha256(unknown)
        return {path: self._source_hashes[path] for path in file.source}

    def _errors_of(self, file: StoreFile) -> dict[str, str]:
        """Return what quantising did to each of the file's matrices, if it was done."""
        errors = {}
        for name, parameter in file.parameters.items():
            if parameter.dtype == "int8" and (error := self._source.error(name)) is not None:
                errors[name] = json.dumps(asdict(error))
        return errors
