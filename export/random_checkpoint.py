"""Random weights in the released format, of any size, for tests and measurements."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.random import Generator

from export_grok.config import GrokConfig
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.parameters import Parameter
from export_grok.export.released_layout import write_released
from export_grok.files import new_folder, write_json
from export_grok.weights import NUMPY_DTYPES

__all__ = ["write_random_checkpoint"]

BLOCK_ITEMS = 1 << 20

# Standard deviation of a uniformly random int8.
INT8_DEVIATION = math.sqrt((256**2 - 1) / 12)


def write_random_checkpoint(
    config: GrokConfig,
    out: Path,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Write a random checkpoint of `config` to `out`: `ckpt-0` and `config.json`.

    Weights spread by 1/sqrt(rows), norms are about 1, so hidden states keep their length. It is
    written in blocks of a few MB; the same config and seed give the same bytes.

    Args:
        config: of any size.
        out: folder, made if it is not there.
        seed: 0 or more.
        progress: takes how many bytes of weights were written since its last call.

    Raises:
        OutputError: `out` cannot be written, or holds something. What was begun is removed.
    """
    with new_folder(out):
        (out / RELEASED_FOLDER).mkdir()
        _write_weights(config, out, seed, progress)


def _write_weights(
    config: GrokConfig, out: Path, seed: int, progress: Callable[[int], None]
) -> None:
    write_json(out / "config.json", config.to_dict())
    for number, (file, parameters) in enumerate(released_files(config).items()):

        def blocks(
            key: str, parameters: dict[str, Parameter] = parameters, number: int = number
        ) -> Iterator[bytes]:
            # One stream for each array: what an array is does not depend on the others.
            stream = np.random.SeedSequence((seed, number, list(parameters).index(key)))
            random = Generator(np.random.Philox(stream))
            for block in _random_blocks(parameters[key], _rows(parameters), random):
                yield block
                progress(len(block))

        write_released(out / RELEASED_FOLDER / file, parameters, blocks)


def _rows(parameters: dict[str, Parameter]) -> int:
    """Return how many products are summed up in one output of the matrix in a file."""
    matrix = parameters.get("weight") or parameters["array"]
    # The embedding is looked up, and as the head it is transposed: its rows have this length.
    return matrix.shape[-1] if matrix.name.startswith("embedding") else matrix.shape[-2:][0]


def _random_blocks(parameter: Parameter, rows: int, random: Generator) -> Iterator[bytes]:
    left = math.prod(parameter.shape)
    deviation = rows**-0.5
    while left:
        count = min(left, BLOCK_ITEMS)
        left -= count
        if parameter.dtype == "int8":
            # Whole words are twice as fast as bytes.
            words = random.integers(0, 1 << 64, -(-count // 8), dtype=np.uint64)
            yield words.astype("<u8").tobytes()[:count]
            continue
        if parameter.name.endswith(".scales"):
            middle = deviation / INT8_DEVIATION
            values = random.uniform(0.8 * middle, 1.2 * middle, count)
        elif len(parameter.shape) == 1:
            values = random.uniform(0.8, 1.2, count)
        else:
            values = deviation * random.standard_normal(count)
        yield values.astype(NUMPY_DTYPES[parameter.dtype]).tobytes()
