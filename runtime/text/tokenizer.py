"""Text to token ids and back.

The model is the published sentencepiece file: byte pairs with byte fallback, no normalisation, a
space put before the text. A character without a piece of its own becomes its UTF-8 bytes, one
token each, so a token need not be a character.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from export_grok.artifacts import Bundle
from export_grok.errors import BundleError, RequestError
from export_grok.regular_file import read_regular

__all__ = ["Tokenizer", "tokenizer_of"]

_REMEDY = "point at the tokenizer.model that was published with the weights"
_SHOWN = 5  # bad ids named in one message; a wrong vocabulary makes nearly every id bad
_PRIVATE = range(0x10FF00, 0x10FFFE)  # characters that Unicode gives no meaning


class Tokenizer:
    """The vocabulary in one sentencepiece file.

    Attributes:
        vocab_size: ids are 0 to vocab_size - 1.
        pad_id: fills a batch, -1 where the file defines none.
        bos_id: begins a text, -1 where the file defines none. `encode` does not add it.
        eos_id: ends an answer, -1 where the file defines none. `encode` does not add it.
        unk_id: stands for what has no piece. With byte fallback `encode` never yields it.

    Raises:
        BundleError: the file cannot be read or is no sentencepiece model.
    """

    def __init__(self, path: Path) -> None:
        try:
            model = read_regular(path)
        except OSError as error:
            raise BundleError(f"{path} cannot be read ({error.strerror}); {_REMEDY}") from error
        self._path = path
        self._pieces = SentencePieceProcessor()
        try:
            self._pieces.load_from_serialized_proto(model)
        except (RuntimeError, UnicodeDecodeError) as error:  # its text names a line of C++
            raise BundleError(
                f"{path} ({len(model)} bytes) is no sentencepiece model, or a damaged one; "
                f"{_REMEDY}"
            ) from error
        self.vocab_size: int = self._pieces.vocab_size()
        self.pad_id: int = self._pieces.pad_id()
        self.bos_id: int = self._pieces.bos_id()
        self.eos_id: int = self._pieces.eos_id()
        self.unk_id: int = self._pieces.unk_id()
        if self.unk_id < 0:
            raise BundleError(f"{path} has no piece for what is unknown: it is damaged; {_REMEDY}")
        # No piece holds this character, so none joins it to the text behind it.
        strangers = (char for char in map(chr, _PRIVATE) if char.encode() not in model)
        self._stranger = next(strangers, "")
        if not self._stranger:
            raise BundleError(f"{path} holds every character from U+10FF00 on; {_REMEDY}")

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without a mark of its beginning or end.

        Raises:
            RequestError: `text` holds half of a surrogate pair, which is no character.
        """
        _check_text(text)
        ids: list[int] = self._pieces.encode(text, out_type=int)
        return ids

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of a `text` that continues another one: no space is put before it.

        For a place behind other ids than control ids alone: at the beginning, where `decode`
        drops a space, `encode` is right.

        Raises:
            RequestError: `text` holds half of a surrogate pair, which is no character.
        """
        _check_text(text)
        return self.encode(self._stranger + text)[len(self.encode(self._stranger)) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; control ids (padding, begin, end) give no text.

        Bytes that are no UTF-8 give one U+FFFD each.

        Raises:
            BundleError: the vocabulary is damaged there.
            RequestError: an id is outside the vocabulary.
        """
        bad = [token for token in ids if not 0 <= token < self.vocab_size]
        if bad:
            more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            raise RequestError(
                f"token id {', '.join(map(str, bad[:_SHOWN]))}{more} is outside the vocabulary of "
                f"{self.vocab_size}; ids are 0 to {self.vocab_size - 1}: use the tokenizer of "
                "the model that made them"
            )
        with self._texts():
            text: str = self._pieces.decode([int(token) for token in ids], out_type=str)
        return text

    def is_control(self, token: int) -> bool:
        """Return whether `token`, an id of the vocabulary, is a mark that has no text."""
        return self._pieces.is_control(int(token))

    def byte(self, token: int) -> int | None:
        """Return the byte that `token`, an id of the vocabulary, is; None if it is text."""
        if not self._pieces.is_byte(int(token)):
            return None
        return int(self._piece(token).strip("<>"), 16)  # "<0xE2>"

    def byte_length(self, token: int) -> int:
        """Return how many bytes of text `token` stands for: 0 for a control token."""
        if self.is_control(token):
            return 0
        if self.byte(token) is not None:
            return 1
        return len(self._piece(token).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode())

    def _piece(self, token: int) -> str:
        with self._texts():
            piece: str = self._pieces.id_to_piece(int(token))
        return piece

    @contextlib.contextmanager
    def _texts(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:
            raise BundleError(
                f"{self._path} has a piece that is no UTF-8: it is damaged; {_REMEDY}"
            ) from error


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has U+{ord(text[error.start]):04X} at character {error.start}, half of "
            "a surrogate pair; it must be Unicode text: read it as UTF-8"
        ) from error


def tokenizer_of(bundle: Bundle) -> Tokenizer:
    """Return the bundle's tokenizer.

    Raises:
        BundleError: it has none, or one of more pieces than the model has.
    """
    if bundle.tokenizer is None:
        raise BundleError(
            f"{bundle.folder} has no tokenizer.model; put it beside the checkpoint and build again"
        )
    tokenizer = Tokenizer(bundle.tokenizer)
    if tokenizer.vocab_size > bundle.config.vocab_size:
        raise BundleError(
            f"{bundle.tokenizer} has {tokenizer.vocab_size} pieces, the model knows "
            f"{bundle.config.vocab_size}: it is the tokenizer of another model"
        )
    return tokenizer
