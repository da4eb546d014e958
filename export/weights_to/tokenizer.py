"""A sentencepiece tokenizer as the keys of a GGUF file."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.weights_to.gguf_format import array, boolean, string, uint32
from export_grok.regular_file import read_regular

__all__ = ["tokenizer_keys"]

# Types of pieces; both formats have the same numbers.
NORMAL, UNUSED = 1, 5

# Numbers of fields, and kinds of them on the wire. Source: src/sentencepiece_model.proto of
# google/sentencepiece. The package tells all but the type of a piece that a user defined.
PIECES, NORMALIZER = 1, 3
TEXT, SCORE, TYPE = 1, 2, 3
ADD_DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES = 3, 4
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def tokenizer_keys(path: Path, config: GrokConfig) -> dict[str, bytes]:
    """Return what a GGUF file says of the tokenizer in `path`, by key.

    Ids beyond the tokenizer's own, up to the model's vocabulary, are unused pieces. A text gets no
    mark of its beginning, as the original gives it none.

    Raises:
        CheckpointError: the file is no sentencepiece model, or one of a larger vocabulary.
    """
    try:
        data = read_regular(path)
        processor = SentencePieceProcessor()
        processor.load_from_serialized_proto(data)
        model = list(_fields(data))
        pieces = [_piece(piece) for field, piece in model if field == PIECES]
        normalizer = dict(_fields(dict(model).get(NORMALIZER, b"")))
    except (IndexError, OSError, RuntimeError, ValueError, struct.error) as error:
        reason = getattr(error, "strerror", None) or "it is no sentencepiece model"
        raise CheckpointError(
            f"{path} cannot be read: {reason}; put the tokenizer.model there that was published "
            "with the weights, or none"
        ) from error
    if len(pieces) > config.vocab_size:
        raise CheckpointError(
            f"{path} has {len(pieces)} pieces, the model knows {config.vocab_size}: it is the "
            "tokenizer of another model; put that of this one there, or none"
        )
    rest = range(len(pieces), config.vocab_size)
    pieces += [(f"[UNUSED_{token}]".encode(), 0.0, UNUSED) for token in rest]
    texts, scores, types = zip(*pieces, strict=True)
    keys = {
        "model": string("llama"),
        "pre": string("default"),
        "tokens": array(texts),
        "scores": array(np.array(scores, np.float32)),
        "token_type": array(np.array(types, np.int32)),
        "bos_token_id": uint32(config.bos_token),
        "eos_token_id": uint32(config.eos_token),
        "padding_token_id": uint32(config.pad_token),
        "add_bos_token": boolean(False),
        "add_eos_token": boolean(False),
        "add_space_prefix": boolean(bool(normalizer.get(ADD_DUMMY_PREFIX, True))),
        "remove_extra_whitespaces": boolean(bool(normalizer.get(REMOVE_EXTRA_WHITESPACES, True))),
    }
    if processor.unk_id() >= 0:
        keys["unknown_token_id"] = uint32(processor.unk_id())
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _piece(data: int | bytes) -> tuple[bytes, float, int]:
    fields = dict(_fields(data))
    match fields.get(TEXT, b""), fields.get(SCORE, bytes(4)), fields.get(TYPE, NORMAL):
        case bytes(text), bytes(score), int(kind):
            return text, struct.unpack("<f", score)[0], kind
    raise ValueError("a piece has fields of other kinds")


def _fields(data: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field of a message in a protocol buffer."""
    if isinstance(data, int):
        raise ValueError("there is a number where a message should be")
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        field, kind = tag >> 3, tag & 7
        if kind == VARINT:
            yield field, varint()
            continue
        if kind not in (FIXED64, BYTES, FIXED32):
            raise ValueError(f"there is a field of kind {kind}")
        length = varint() if kind == BYTES else 8 if kind == FIXED64 else 4
        yield field, data[at : at + length]
        at += length
