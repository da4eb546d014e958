"""The text of tokens that come one after another: whole characters, as soon as they are known."""

import codecs
from collections.abc import Sequence

from export_grok.runtime.text.tokenizer import Tokenizer

__all__ = ["StreamDecoder"]

_INCOMPLETE = 3  # bytes that a character can have before its last one


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
