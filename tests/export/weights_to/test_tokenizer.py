"""A GGUF file's tokenizer is the sentencepiece model's: pieces, scores, types, ids."""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.demo import DEMO_MODEL
from export_grok.export.weights_to.gguf_format import header
from export_grok.export.weights_to.tokenizer import tokenizer_keys
from tests.export.weights_to.gguf_reader import read_gguf

DEMO = GrokConfig.from_file(DEMO_MODEL / "config.json")
MODEL = DEMO_MODEL / "tokenizer.model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def read(path: Path, out: Path, config: GrokConfig = DEMO) -> dict[str, Any]:
    file = out / "keys.gguf"
    file.write_bytes(header(tokenizer_keys(path, config), ()))
    keys = read_gguf(file).keys
    assert all(name.startswith("tokenizer.ggml.") for name in keys)
    return {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()}


def test_pieces_and_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    keys = read(MODEL, tmp_path)
    pieces = SentencePieceProcessor(model_file=str(MODEL))
    ids = range(pieces.vocab_size())
    assert keys["tokens"] == [pieces.id_to_piece(i) for i in ids]
    assert keys["scores"] == [pieces.get_score(i) for i in ids]
    types = [
        UNKNOWN
        if pieces.is_unknown(i)
        else CONTROL
        if pieces.is_control(i)
        else BYTE
        if pieces.is_byte(i)
        else NORMAL
        for i in ids
    ]
    assert keys["token_type"] == types
    assert set(types) == {UNKNOWN, CONTROL, BYTE, NORMAL}
    assert keys["model"] == "llama"
    assert keys["unknown_token_id"] == pieces.unk_id()
    for name, token in (("bos", 1), ("eos", 2), ("padding", 0)):
        assert keys[f"{name}_token_id"] == token
    assert (keys["add_bos_token"], keys["add_eos_token"]) == (False, False)


def test_spaces_are_put_and_kept_as_the_model_says(tmp_path: Path) -> None:
    keys = read(MODEL, tmp_path)
    pieces = SentencePieceProcessor(model_file=str(MODEL))
    assert keys["add_space_prefix"] == (
        pieces.encode("a") == pieces.encode(" a", out_type=int)[1:]
    )
    assert keys["remove_extra_whitespaces"] == (pieces.encode("a  b") == pieces.encode("a b"))


def test_a_piece_that_a_user_defined_stays_one(tmp_path: Path) -> None:
    piece = b"\x0a\x05<|x|>\x15" + struct.pack("<f", -1.5) + b"\x18\x04"
    changed = tmp_path / "tokenizer.model"
    changed.write_bytes(MODEL.read_bytes() + b"\x0a" + bytes([len(piece)]) + piece)
    keys = read(changed, tmp_path, dataclasses.replace(DEMO, vocab_size=1030))
    assert keys["tokens"][1024:] == [
        "<|x|>",
        *(f"[UNUSED_{token}]" for token in range(1025, 1030)),
    ]
    assert keys["token_type"][1024:] == [USER_DEFINED] + [UNUSED] * 5
    assert keys["scores"][1024] == -1.5


def test_the_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="1024 pieces, the model knows 512"):
        tokenizer_keys(MODEL, dataclasses.replace(DEMO, vocab_size=512))


@pytest.mark.parametrize("content", [b"", b"no model", MODEL.read_bytes()[:5000]])
def test_what_is_no_tokenizer_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        tokenizer_keys(path, DEMO)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        tokenizer_keys(tmp_path / "tokenizer.model", DEMO)
