"""A made-up Grok-1 in the released format: small for a first try, or of any size for measurements.

The weights are random, so what it says means nothing. Everything but the size is real: int8
experts with 8 scale groups, six query heads to a key/value head, a tied embedding, a tokenizer.
"""

import contextlib
import io
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.random import Generator

from export_grok.config import GrokConfig
from export_grok.errors import OutputError
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.parameters import Parameter
from export_grok.export.released_layout import write_released
from export_grok.files import atomic_file, output_errors, write_json
from export_grok.weights import NUMPY_DTYPES

__all__ = ["DEMO", "write_demo_checkpoint", "write_random_checkpoint"]

BLOCK_ITEMS = 1 << 20

# Standard deviation of a uniformly random int8.
INT8_DEVIATION = math.sqrt((256**2 - 1) / 12)

DEMO = GrokConfig(
    num_layers=4,
    emb_size=192,
    num_q_heads=48,
    num_kv_heads=8,
    key_size=8,
    ffn_size=128,
    vocab_size=512,
    sequence_len=512,
    attn_output_multiplier=8**-0.5,
    embedding_multiplier_scale=192**0.5,
    output_multiplier_scale=3**-0.5,
)

# What the demo's tokenizer learns its 512 pieces from.
_TEXT = """\
The lighthouse keeper wrote one line in her log every evening, and it was always about the weather.
On the first night of winter the wind came from the north, and she wrote that the sea was loud.
On the second night the wind had gone, so she wrote that the sea was listening.
A small boat came in at dawn with two people, 14 baskets of fish and a broken oar.
They asked how far it was to the town, and whether the road along the coast was open.
"It is open as long as the tide is out," she said, "and the tide is out until ten."
They thanked her, left a basket at the door, and walked away between the stones.
In the afternoon she climbed the 128 steps, cleaned the glass, trimmed the lamp, counted the ships.
There were three: a grey one, a green one, and one too far away to have a colour.
What does a lamp know about the ships that it guides? Nothing, and yet it turns.
When the answer is not known, write the question down; someone else may read it in the morning.
She slept with the window open. The lamp turned above her, once every twelve seconds, all night.
"""


def write_demo_checkpoint(out: Path, seed: int = 0) -> GrokConfig:
    """Write the demo's checkpoint, config and tokenizer to `out`, 4 MB, and return its config.

    The same seed gives the same bytes.

    Raises:
        OutputError: `out` cannot be written, or holds something.
    """
    with _new_folder(out):
        _write_weights(DEMO, out, seed)
        with atomic_file(out / "tokenizer.model") as file:
            file.write(_tokenizer(DEMO))
    return DEMO


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
    with _new_folder(out):
        _write_weights(config, out, seed, progress)


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Make `out`, or take it empty, and empty it again if the block fails."""
    with output_errors(out):
        found = out.exists()
        if found and any(out.iterdir()):
            raise OutputError(f"{out} is not empty; choose a new folder")
        (out / RELEASED_FOLDER).mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        if found:
            out.mkdir(exist_ok=True)
        raise


def _write_weights(
    config: GrokConfig,
    out: Path,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
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


def _tokenizer(config: GrokConfig) -> bytes:
    """Return a sentencepiece model of the config's vocabulary, with the options of Grok-1's."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(_TEXT.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=config.vocab_size,
        hard_vocab_limit=False,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_id=config.pad_token,
        bos_id=config.bos_token,
        eos_id=config.eos_token,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[BOS]",
        eos_piece="[EOS]",
        unk_piece="[UNK]",
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
