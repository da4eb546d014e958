"""A random Grok-1 of middle size in the released format: what all peers get their weights from.

698 MB of int8 codes are read for a token, more than any cache holds, and the whole is 2.6 GB.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from export_grok.config import GROK_1, GrokConfig
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.parameters import Parameter
from export_grok.export.released_layout import write_released
from export_grok.files import new_folder, write_json

__all__ = ["MID", "write_mid_model"]

MID = dataclasses.replace(
    GROK_1,
    num_layers=8,
    emb_size=1536,
    num_q_heads=12,
    num_kv_heads=2,
    ffn_size=8192,
    vocab_size=32768,
    sequence_len=2048,
)

# No code is -128: Q8_0 and 8-bit blocks with a zero point have it, our head has not.
TOP_CODE = 127
CODE_DEVIATION = math.sqrt(((2 * TOP_CODE + 1) ** 2 - 1) / 12)
# Logits of the router spread by 2: experts are chosen clearly, and all of them are.
ROUTER_DEVIATION = 2.0
EMBEDDING_DEVIATION = 0.02
BLOCK_ITEMS = 1 << 22


def write_mid_model(out: Path, config: GrokConfig = MID, seed: int = 0) -> None:
    """Write the checkpoint to `out`; the same config and seed give the same bytes.

    Matrices spread by 1/sqrt(rows) and norms are about 1, so hidden states keep their length. A
    row of the embedding is int8 codes times one scale, exactly, with a code of 127 or -127 among
    them: whoever quantises it by its largest value gets these codes back.

    Raises:
        OutputError: `out` cannot be written, or holds something.
    """
    with new_folder(out):
        (out / RELEASED_FOLDER).mkdir()
        for number, (file, parameters) in enumerate(released_files(config).items()):

            def blocks(
                key: str, parameters: dict[str, Parameter] = parameters, number: int = number
            ) -> Iterator[bytes]:
                stream = np.random.SeedSequence((seed, number, list(parameters).index(key)))
                return _blocks(key, parameters, np.random.Generator(np.random.Philox(stream)))

            write_released(out / RELEASED_FOLDER / file, parameters, blocks)
        write_json(out / "config.json", config.to_dict())


def _blocks(key: str, parameters: dict[str, Parameter], random: Generator) -> Iterator[bytes]:
    parameter = parameters[key]
    count = math.prod(parameter.shape)
    if parameter.name == "embedding.weight":
        yield from _embedding(*parameter.shape, random)
    elif key == "weight":
        for first in range(0, count, BLOCK_ITEMS):
            yield _codes(min(BLOCK_ITEMS, count - first), random).tobytes()
    elif key == "scales":
        rows = parameters["weight"].shape[-2]
        yield _scales(count, 1 / math.sqrt(rows), random).tobytes()
    elif len(parameter.shape) == 1:
        yield (1 + 0.1 * random.standard_normal(count)).astype(np.float32).tobytes()
    else:
        deviation = ROUTER_DEVIATION / math.sqrt(parameter.shape[0])
        yield (deviation * random.standard_normal(count)).astype(np.float32).tobytes()


def _embedding(vocabulary: int, width: int, random: Generator) -> Iterator[bytes]:
    # 8 bits of a bfloat16 scale and 7 of a code fit into a float32: the product is exact.
    scales = _scales(vocabulary, EMBEDDING_DEVIATION, random).astype(np.float32)
    for part in np.array_split(scales, max(1, vocabulary * width // BLOCK_ITEMS)):
        codes = _codes(len(part) * width, random).reshape(len(part), width)
        rows = np.arange(len(part))
        codes[rows, random.integers(0, width, len(part))] = TOP_CODE * (1 - 2 * (rows % 2))
        yield (codes * part[:, None]).tobytes()


def _codes(count: int, random: Generator) -> NDArray[np.int8]:
    return random.integers(-TOP_CODE, TOP_CODE, count, dtype=np.int8, endpoint=True)


def _scales(count: int, deviation: float, random: Generator) -> NDArray[ml_dtypes.bfloat16]:
    middle = deviation / CODE_DEVIATION
    return random.uniform(0.75 * middle, 1.25 * middle, count).astype(ml_dtypes.bfloat16)
