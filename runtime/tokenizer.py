"""Text to token ids and back, whole or as a stream.

The model is the published sentencepiece file: byte pairs with byte fallback, no normalisation, a
space put before the text. A character without a piece of its own becomes its UTF-8 bytes, one
token each, so a token need not be a character.
"""

import codecs
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from export_grok.artifacts import Bundle
from export_grok.errors import BundleError, RequestError
from export_grok.regular_file import read_regular

__all__ = ["StreamDecoder", "Tokenizer", "tokenizer_of"]

_REMEDY = "point at the tokenizer.model that was published with the weights"
_SHOWN = 5  # bad ids named in one message; a wrong vocabulary makes nearly every id bad
_PRIVATE = range(0x10FF00, 0x10FFFE)  # characters that Unicode gives no meaning
_INCOMPLETE = 3  # bytes that a character can have before its last one


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


class StreamDecoder:
    """The text of a token sequence, given out as it becomes known.

    All the pieces joined, with the one from `finish`, are `decode` of all the ids. No piece ends
    inside a UTF-8 character: bytes wait until they are one, or can no longer become one. A
    character of several code points (a family emoji) may still come in several pieces.

    A push decodes a handful of tokens, however many came before.

    Args:
        tokenizer: whose ids will come.
        prompt_ids: what comes before the stream and is not given out. Bytes at its end that are
            not yet a character are given out, as part of that character.

    Raises:
        RequestError: an id of the prompt is outside the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # What a decode depends on besides the tokens themselves is only whether it stands at the
        # beginning, where one space is dropped. These few tokens put it in the same state.
        self._context: list[int] = []
        self._context_text = ""
        self._waiting: list[int] = []  # bytes that may yet become one character
        if tokenizer.decode(prompt_ids[:-_INCOMPLETE]):
            self._begin()
            prompt_ids = prompt_ids[-_INCOMPLETE:]  # no other token can still wait
        for token in prompt_ids:
            self.push(token)

    @property
    def waiting(self) -> int:
        """How many tokens at the end, of the prompt too, have a text that is not yet known."""
        return len(self._waiting)

    def push(self, token: int) -> str:
        """Return the text that `token` completes, often none.

        Raises:
            RequestError: `token` is outside the vocabulary; the stream is as before.
        """
        return "".join(text for _, text in self.settle(token))

    def finish(self) -> str:
        """Return the text of what still waits: U+FFFD for each byte of a broken character.

        To be called once, after the last push.
        """
        return "".join(text for _, text in self.settle(None))

    def settle(self, token: int | None) -> list[tuple[int, str]]:
        """Push `token`, or finish if it is None; return the text by the tokens it is of.

        Returns:
            numbers of tokens and their text, in order: the bytes of a character together, any
            other token by itself.

        Raises:
            RequestError: `token` is outside the vocabulary; the stream is as before.
        """
        if token is not None:
            if not 0 <= token < self._tokenizer.vocab_size:
                self._tokenizer.decode([token])  # raises
            self._waiting.append(token)
        settled = []
        while count := self._known(ended=token is None):
            settled.append((count, self._text(self._waiting[:count])))
            del self._waiting[:count]
        return settled

    def _known(self, *, ended: bool) -> int:
        """How many tokens the next text is of: a character's, or one; 0 if it is not yet known."""
        values = [self._tokenizer.byte(token) for token in self._waiting]
        data = bytes(value for value in values if value is not None)
        if not data:
            return len(values)  # none, or one that is no byte
        ended = ended or len(data) < len(values)  # a token that is no byte ends every character
        if b"\xed\xa0" <= data < b"\xee":  # a surrogate: Python waits for its last byte
            ended = True
        text, _ = codecs.utf_8_decode(data, "replace", ended)
        character = text[:1].encode()
        return len(character) if data.startswith(character) else 1

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode([*self._context, *tokens])[len(self._context_text) :]
        if text and not self._context_text:
            self._begin()
        elif not self._context and not self._tokenizer.is_control(tokens[-1]):
            self._context = tokens  # the lone space that was dropped: the next one is kept
        return text

    def _begin(self) -> None:
        # Any token with text would do. This one every vocabulary has, and it is no byte that
        # could join the next ones.
        self._context = [self._tokenizer.unk_id]
        self._context_text = self._tokenizer.decode(self._context)


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
