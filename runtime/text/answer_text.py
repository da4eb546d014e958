"""The text of one answer while its tokens come, up to a stop string."""

from collections import deque
from collections.abc import Sequence

from export_grok.runtime.text.stop_strings import StopStrings
from export_grok.runtime.text.stream_decoder import StreamDecoder
from export_grok.runtime.text.tokenizer import Tokenizer

__all__ = ["AnswerText"]


class AnswerText:
    """The text of an answer, given out as soon as it is known and cannot be of a stop string.

    Only text of the answer ends it: a stop string that begins in the prompt is none. Control
    tokens have no text, and no piece ends inside a UTF-8 character. A push costs the same whatever
    came before.

    At any time, of the tokens `answer` pushed so far,

        decode([*prompt_ids, *answer[:whole]]) + rest == decode(prompt_ids) + text

    if the prompt does not end inside a character. What was shown is continued behind
    `[*prompt_ids, *answer[:whole], *tokenizer.encode_more(rest)]`.

    Args:
        tokenizer: whose ids will come.
        prompt_ids: what the answer continues. Bytes at its end that are not yet a character are
            given out, as part of that character.
        stop: strings of which the first that is complete ends the answer.

    Raises:
        RequestError: an id of the prompt is outside the vocabulary, or a stop string is empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, prompt_ids)
        self._stop = StopStrings(stop)
        self._shown: list[str] = []
        self._length = 0  # characters in `_shown`
        # Places between tokens: how many tokens of the answer (below 0: in the prompt), and how
        # many characters of its text, are before it.
        self._decoded = (-self._decoder.waiting, 0)
        self._ahead: deque[tuple[int, int]] = deque()  # those behind the text that is shown
        self._whole = (0, 0)  # the last one in it

    def push(self, token: int) -> str:
        """Return the text that can be shown now that `token` has come, often none.

        Raises:
            RequestError: `token` is outside the vocabulary; all is as before.
        """
        return self._show(self._stop.push(self._decode(token)))

    def finish(self) -> str:
        """Return the text that was held back, as no more tokens come: "" if `stopped`.

        Each byte of a character that was not completed is U+FFFD.
        """
        last = self._stop.push(self._decode(None))
        return self._show(last + self._stop.finish())

    @property
    def stopped(self) -> bool:
        """A stop string is complete: neither it nor what comes behind it is shown."""
        return self._stop.stopped

    @property
    def text(self) -> str:
        """All that was given out, joined when asked for."""
        return "".join(self._shown)

    @property
    def whole(self) -> int:
        """How many leading tokens of the answer have all their text in `text`."""
        return max(0, self._whole[0])

    @property
    def rest(self) -> str:
        """The part of `text` behind those tokens."""
        return self.text[self._whole[1] :]

    def _decode(self, token: int | None) -> str:
        pieces = self._decoder.settle(token)
        for count, text in pieces:
            tokens, characters = self._decoded
            self._decoded = (tokens + count, characters + len(text))
            self._ahead.append(self._decoded)
        return "".join(text for _, text in pieces)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
            self._length += len(text)
        while self._ahead and self._ahead[0][1] <= self._length:
            self._whole = self._ahead.popleft()
        return text
