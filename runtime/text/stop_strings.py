"""Strings that end a text which comes in pieces.

The automaton of Aho and Corasick, "Efficient string matching: an aid to bibliographic search"
(1975): one step a character, for all strings at once, whatever came before.
"""

from collections import deque
from collections.abc import Sequence

from export_grok.errors import RequestError

__all__ = ["StopStrings"]


class StopStrings:
    """A text up to the first of some strings, given out as early as it is known to be before it.

    Where a string is complete, the text ends: with the first character at which one of them is,
    and in front of the longest of those that are complete there. Text that may be the beginning
    of a string is held back until it no longer can be.

    Attributes:
        stopped: a string was completed. Neither it nor what stands behind it is given out.

    Args:
        strings: any number of them; one may be part of another.

    Raises:
        RequestError: one is empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise RequestError("a stop string is empty; give one or more characters")
        self.stopped = False
        self._held = ""  # the longest end of the text that begins a string
        self._state = 0  # names `_held` by its place in the tree of all beginnings
        self._next: list[dict[str, int]] = [{}]  # of a beginning: those with one more character
        self._depth = [0]  # its length
        self._ends = [0]  # length of the longest string that ends with it, 0 if none does
        self._shorter = [0]  # the longest beginning that ends with it, itself left out
        for string in strings:
            self._plant(string)
        self._connect()

    def push(self, text: str) -> str:
        """Return what can be given out now that `text` has come: "" after the end."""
        if self.stopped:
            return ""
        come = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._step(self._state, character)
            if length := self._ends[self._state]:
                self.stopped = True
                self._held = ""
                return come[: end - length]
        known = len(come) - self._depth[self._state]
        self._held = come[known:]
        return come[:known]

    def finish(self) -> str:
        """Return what was held back: no more text comes. "" if a string was completed."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _plant(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._ends.append(0)
                self._shorter.append(0)
            state = self._next[state][character]
        self._ends[state] = len(string)

    def _connect(self) -> None:
        """Find `_shorter` of every beginning, from the short ones to the long ones."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            shorter = self._shorter[state]
            self._ends[state] = self._ends[state] or self._ends[shorter]
            for character, longer in self._next[state].items():
                self._shorter[longer] = self._step(shorter, character)
                waiting.append(longer)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)
