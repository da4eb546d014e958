"""A checkpoint in another layout as a source of tensors in ours, quantised as it is read."""

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError, UnsafePickleError
from export_grok.export.checkpoint import first_layers
from export_grok.export.faults import capped
from export_grok.export.index_source import FileHash
from export_grok.export.layouts.assemble import assembled
from export_grok.export.layouts.folder import read_folder
from export_grok.export.layouts.foreign_config import found_config
from export_grok.export.layouts.matrix import Matrix, check_equal
from export_grok.export.layouts.names import EMBEDDING, HEAD, ROUTER, Place
from export_grok.export.layouts.parts import parts_of, recognised
from export_grok.export.layouts.source_tensor import RowReader
from export_grok.export.parameters import Parameter, model_parameters
from export_grok.export.quantisation import QuantisedTensor
from export_grok.export.quantise import Quantiser, check_finite

__all__ = ["ForeignSource", "foreign_source"]

# Values that are widened at once, and output columns: whole lines of 64 bytes where they are
# written. Blocks of this size stay in a core's cache.
BLOCK_VALUES = 1 << 19
BLOCK_COLUMNS = 64
YIELD_BYTES = 8 << 20


def foreign_source(
    path: Path,
    config: GrokConfig | None = None,
    layers: int | None = None,
    groups: int | None = None,
) -> "ForeignSource":
    """Return the tensors of a checkpoint that others published in a layout of theirs.

    Only headers are read.

    Args:
        path: folder of its files.
        config: hyper-parameters of the whole checkpoint; without it those in config.json, and for
            what that leaves open those of the shapes, or of the published Grok-1.
        layers: take only the first so many. The files of the others need not be there.
        groups: of rows with scales of their own, in matrices that are cut by rows; without it as
            the config says, or 8 as released.

    Raises:
        CheckpointError: files are damaged, or tensors are missing, unknown or not those of the
            config. All faults are found before it is raised; its text shows the first of them.
        ConfigError: the config cannot be read, is of another model, or has fewer layers.
        MissingDependencyError: there are `.bin` files and no torch.
        UnsafePickleError: files ask for something that is no tensor.
    """
    folder = read_folder(path)
    if folder.unsafe:
        raise capped(UnsafePickleError, f"{path} is not to be trusted:", folder.unsafe)
    if folder.damaged and not folder.tensors:
        raise capped(CheckpointError, f"{path} holds no file that is whole:", folder.damaged)
    parts = parts_of(recognised(path, folder), folder)
    if config is None:
        whole, source = found_config(path, parts, groups)
    else:
        whole, source = config, "the given config"
        if groups is not None:
            whole = dataclasses.replace(config, row_parallel_scale_groups=groups)
    wanted = first_layers(whole, layers, source)
    made = assembled(parts, folder, whole, wanted, source)
    if faults := [*made.misfits, *folder.damaged, *made.faults]:
        many = len(made.misfits) > len(made.matrices)
        what = "seems to be another model than" if many else "does not hold what"
        raise capped(
            CheckpointError,
            f"{path}, in layout {parts.layout.name}, {what} {source} asks for "
            f"({len(faults)} faults):",
            faults,
        )
    return ForeignSource(path, parts.layout.name, wanted, made.matrices, folder.lengths)


class ForeignSource:
    """A `TensorSource` over files in another layout: matrices are quantised as they are read.

    What is held at once is one int8 matrix, or one expert's, and some MB of float values.
    """

    def __init__(
        self,
        root: Path,
        layout: str,
        config: GrokConfig,
        matrices: Mapping[Place, Matrix],
        lengths: Mapping[str, int],
    ) -> None:
        """Take the tensors of a model.

        Args:
            root: folder of their files.
            layout: name of the layout.
            config: of the model.
            matrices: all of its tensors.
            lengths: of the files in bytes.
        """
        self.root, self.layout, self.config = root, layout, config
        self._parameters = model_parameters(config)
        self._head = matrices.get(Place(HEAD))
        self._matrices: dict[str, list[Matrix]] = defaultdict(list)
        for place, matrix in sorted(matrices.items(), key=lambda item: item[0].expert or 0):
            self._matrices[place.name].append(matrix)
        used = {file for matrix in matrices.values() for file in matrix.files}
        self._hashes = {file: FileHash(root / file, lengths[file]) for file in sorted(used)}
        self.files: Mapping[str, int] = {file: lengths[file] for file in self._hashes}
        self._scales: dict[str, NDArray[Any]] = {}
        self._errors: dict[str, QuantisedTensor] = {}

    def origins(self, name: str) -> tuple[str, ...]:
        """Return the files that parameter `name` is made from."""
        matrices = list(self._matrices[_weight_of(name)])
        if name == EMBEDDING and self._head:
            matrices.append(self._head)
        return tuple(sorted({file for matrix in matrices for file in matrix.files}))

    def error(self, name: str) -> QuantisedTensor | None:
        """Return what quantising did to the matrix of parameter `name`, once it was read."""
        return self._errors.get(_weight_of(name))

    def sha256(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hash of every file that these parameters came from, whole, by path.

        Raises:
            CheckpointError: a file cannot be read, or has another length than before.
        """
        files = sorted({file for name in names for file in self.origins(name)})
        return {file: self._hashes[file].whole() for file in files}

    def blocks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of parameter `name` in order; a block is good until the next.

        Raises:
            CheckpointError: a file cannot be read to the end of a tensor, a value is no finite
                number, or tensors that must be the same are not.
        """
        parameter = self._parameters[name]
        if parameter.groups is not None:
            yield from self._codes(parameter)
        elif name.endswith(".scales"):
            if name not in self._scales:
                for _ in self._codes(self._parameters[_weight_of(name)]):
                    pass
            yield _bytes(self._scales.pop(name))
        else:
            yield from self._floats(parameter)

    def _codes(self, parameter: Parameter) -> Iterator[memoryview]:
        """Yield an int8 matrix after the other, and keep their scales and what was lost."""
        *_, rows, columns = parameter.shape
        quantiser = Quantiser(rows, columns, parameter.groups or 1, restore=True)
        reader = RowReader(self.root)
        count = max(BLOCK_COLUMNS, BLOCK_VALUES // rows // BLOCK_COLUMNS * BLOCK_COLUMNS)
        values = np.empty((min(count, columns), rows), np.float32)
        scales = []
        for matrix in self._matrices[parameter.name]:
            for first in range(0, columns, count):
                block = values[: columns - first]
                matrix.read(reader, first, block)
                with self._named(matrix):
                    quantiser.add(first, block)
            yield from _pieces(quantiser.codes)
            scales.append(quantiser.scales.copy())
        name = parameter.name.removesuffix(".weight")
        self._errors[parameter.name] = quantiser.error(name)
        shape = self._parameters[f"{name}.scales"].shape
        self._scales[f"{name}.scales"] = np.stack(scales).reshape(shape)

    def _floats(self, parameter: Parameter) -> Iterator[memoryview]:
        """Yield rows of a float tensor; all at once where rows stand for columns."""
        (matrix,) = self._matrices[parameter.name]
        rows, *rest = matrix.shape
        transposed = parameter.name.endswith(ROUTER)
        count = rows if transposed else max(1, BLOCK_VALUES // math.prod(rest))
        reader = RowReader(self.root)
        for first in range(0, rows, count):
            values = np.empty((min(count, rows - first), *rest), np.float32)
            matrix.read(reader, first, values)
            with self._named(matrix):
                check_finite(values, first)
            if parameter.name == EMBEDDING and self._head is not None:
                head = np.empty_like(values)
                self._head.read(reader, first, head)
                names = (matrix.name, self._head.name)
                check_equal(values, head, first, names, "Grok-1 has one table for both")
            yield _bytes(values.T if transposed else values)

    @contextlib.contextmanager
    def _named(self, matrix: Matrix) -> Iterator[None]:
        """Say whose values an error is about."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self.root}: {matrix.name} {error}") from error


def _weight_of(name: str) -> str:
    """Return the parameter that is read where `name` is asked for: scales come with a matrix."""
    return name.removesuffix(".scales") + ".weight" if name.endswith(".scales") else name


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    whole = _bytes(array)
    for first in range(0, len(whole), YIELD_BYTES):
        yield whole[first : first + YIELD_BYTES]
