"""The output head as int8: the embedding's table, with one scale for each vocabulary entry.

    scales[v] = max |table[v, m]| / 127 over m, rounded up to float32
    codes[m, v] = round(table[v, m] / scales[v]), ties to the even number: -127 to 127

Its file holds all weights of the head's graphs, each at a multiple of 64 bytes: codes [M, V],
scales [1, V], and a copy of the final norm's scale [M]. So these graphs need the bundle only,
wherever the other weights lie. Letters are those of `export.model`.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import HEAD_WEIGHTS
from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.parameters import head_parameters
from export_grok.files import atomic_file
from export_grok.manifest import HeadError
from export_grok.progress import progress_bar
from export_grok.weights import Weight, WeightIndex, WeightReader

__all__ = ["head_error", "head_index", "quantised", "write_head"]

TABLE = "embedding.weight"
CODES = "unembedding.weight"
SCALES = "unembedding.scales"
NORM = "final_norm.scale"

LARGEST = 127
ALIGNMENT = 64
# Vocabulary entries that are in memory at once. Their codes are a page in every row of the file.
ENTRIES = 4096


def head_index(config: GrokConfig, root: Path) -> WeightIndex:
    """Return where the weights of an int8 head lie in a bundle.

    Args:
        config: of the model.
        root: folder of the bundle.
    """
    weights: dict[str, Weight] = {}
    end = 0
    for name, parameter in head_parameters(config).items():
        weights[name] = Weight(
            name=name,
            file=HEAD_WEIGHTS,
            offset=end + -end % ALIGNMENT,
            dtype=parameter.dtype,
            shape=parameter.shape,
            groups=parameter.groups,
        )
        end = weights[name].offset + weights[name].nbytes
    return WeightIndex(root=root, weights=weights, files={HEAD_WEIGHTS: end})


def write_head(
    config: GrokConfig, index: WeightIndex, out: Path, *, resume: bool = False
) -> WeightIndex:
    """Write the int8 head of a model into the folder `out`; return where its weights lie.

    Args:
        config: of the model.
        index: where its table and final norm lie.
        out: folder of the bundle.
        resume: keep a file that an earlier call for the same weights has written.

    Raises:
        CheckpointError: the table cannot be read, or holds what is no finite number.
        OutputError: `out` cannot be written.
    """
    head = head_index(config, out)
    path, length = out / HEAD_WEIGHTS, head.files[HEAD_WEIGHTS]
    if resume and path.exists() and path.stat().st_size == length:
        return head
    with atomic_file(path) as file, progress_bar("head", config.vocab_size, unit="rows") as done:
        for first, entries in _table(index):
            codes, scales = quantised(entries, first=first)
            for row, part in enumerate(codes):
                file.seek(head[CODES].offset + row * config.vocab_size + first)
                file.write(part.data)
            file.seek(head[SCALES].offset + first * scales.itemsize)
            file.write(scales.data)
            done(len(entries))
        file.seek(head[NORM].offset)
        file.write(WeightReader(index.root).read(index[NORM]).tobytes())
    return head


def quantised(
    entries: NDArray[np.float32], *, first: int = 0
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return int8 codes [M, V] and float32 scales [V] of rows [V, M] of the table.

    Args:
        entries: the rows.
        first: number of the first of them, for the message.

    Raises:
        CheckpointError: a row holds what is no finite number.
    """
    largest = np.maximum(entries.max(axis=1), -entries.min(axis=1))
    if not np.isfinite(largest).all():
        entry = first + int(np.flatnonzero(~np.isfinite(largest))[0])
        raise CheckpointError(
            f"{TABLE} holds inf or nan in the row of token {entry}: its head cannot be int8; get "
            "the file again, or use --head float32"
        )
    exact = largest.astype(np.float64) / LARGEST
    near = exact.astype(np.float32)
    scales = np.where(near < exact, np.nextafter(near, np.float32(np.inf)), near)
    # An entry of zeros is zero by any scale.
    quotients = entries / np.where(scales == 0, np.float32(1), scales)[:, np.newaxis]
    codes = np.rint(quotients, out=quotients).astype(np.int8)
    return np.ascontiguousarray(codes.T), scales


def head_error(index: WeightIndex, head: WeightIndex) -> HeadError:
    """Return how far the int8 head in a bundle is from the table.

    Args:
        index: where the table lies.
        head: as `write_head` returned it.

    Raises:
        CheckpointError: a file cannot be read.
    """
    square = difference = largest = 0.0
    with progress_bar("error of the head", index[TABLE].shape[0], unit="rows") as done:
        for first, entries in _table(index):
            part = slice(first, first + len(entries))
            reader = WeightReader(head.root)
            codes = np.ascontiguousarray(reader.read(head[CODES])[:, part].T)
            error = codes * reader.read(head[SCALES])[0, part, np.newaxis]
            error -= entries
            squares, differences = _row_squares(entries), _row_squares(error)
            square += float(squares.sum())
            difference += float(differences.sum())
            some = squares > 0  # an entry of zeros has no error
            ratios = differences[some] / squares[some]
            largest = max(largest, float(ratios.max(initial=0.0)))
            done(len(entries))
    return HeadError(
        relative=math.sqrt(difference / square) if square else 0.0, largest=math.sqrt(largest)
    )


def _table(index: WeightIndex) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield some rows of the table after the other, with the number of the first of them."""
    table = index[TABLE]
    vocabulary, width = table.shape
    for first in range(0, vocabulary, ENTRIES):
        rows = min(ENTRIES, vocabulary - first)
        part = dataclasses.replace(
            table,
            shape=(rows, width),
            offset=table.offset + first * (table.nbytes // vocabulary),
        )
        # A reader of its own for each part: what it has mapped leaves memory with it.
        yield first, WeightReader(index.root).read(part).astype(np.float32)


def _row_squares(array: NDArray[np.float32]) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.einsum("vm,vm->v", array, array, dtype=np.float64)
    return sums
