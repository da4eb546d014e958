"""The tokens that a verification feeds: rows of different length, of a text or at random."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export_grok.artifacts import Bundle
from export_grok.errors import RequestError
from export_grok.runtime.text.tokenizer import tokenizer_of

__all__ = ["TEXT", "Rows", "batch_of", "lengths_of", "rows_of"]

# Of the rows' prompts: as parts of the longest.
PARTS = (1.0, 0.7, 0.15)

# Ecclesiastes 1 and 3, King James Version.
TEXT = """\
The words of the Preacher, the son of David, king in Jerusalem. Vanity of vanities, saith the \
Preacher, vanity of vanities; all is vanity. What profit hath a man of all his labour which he \
taketh under the sun? One generation passeth away, and another generation cometh: but the earth \
abideth for ever. The sun also ariseth, and the sun goeth down, and hasteth to his place where he \
arose. All the rivers run into the sea; yet the sea is not full; unto the place from whence the \
rivers come, thither they return again. The thing that hath been, it is that which shall be; and \
that which is done is that which shall be done: and there is no new thing under the sun. To every \
thing there is a season, and a time to every purpose under the heaven: a time to be born, and a \
time to die; a time to plant, and a time to pluck up that which is planted; a time to kill, and a \
time to heal; a time to break down, and a time to build up; a time to weep, and a time to laugh."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is fed.

    Attributes:
        rows: token ids of each.
        source: where they come from, in a few words.
    """

    rows: tuple[tuple[int, ...], ...]
    source: str


def batch_of(bundle: Bundle) -> int:
    """Return how many rows are fed: three, or what the engine was built for if that is less."""
    return min(len(PARTS), bundle.sizes.get("batch", len(PARTS)))


def lengths_of(batch: int, *, prompt: int, tokens: int) -> list[int]:
    """Return the tokens of each row: its part of the longest prompt, and those decoded singly."""
    return [max(1, int(prompt * part)) + tokens for part in PARTS[:batch]]


def rows_of(
    bundle: Bundle, *, prompt: int, tokens: int, batch: int, text: Path | None = None
) -> Rows:
    """Return rows of which the longest has `prompt + tokens` tokens.

    Args:
        bundle: its tokenizer is used; without one, tokens are drawn at random.
        prompt: tokens of the longest row before those decoded singly.
        tokens: that are decoded singly, in every row.
        batch: how many rows at most.
        text: what to take tokens from; some verses by default.

    Raises:
        BundleError: a text was given, and the bundle has no tokenizer, or one of another model.
        RequestError: the text cannot be read, or is too short.
    """
    lengths = lengths_of(batch, prompt=prompt, tokens=tokens)
    if text is None and bundle.tokenizer is None:
        random = np.random.default_rng(0)
        some = [random.integers(3, bundle.config.vocab_size, length) for length in lengths]
        return Rows(
            rows=tuple(tuple(row.tolist()) for row in some),
            source="random tokens, as the bundle has no tokenizer",
        )
    ids = tokenizer_of(bundle).encode(_read(text) if text else TEXT)
    if len(ids) < sum(lengths):
        if text is None:  # the verses once more
            ids = ids * (1 + sum(lengths) // len(ids))
        else:
            raise RequestError(
                f"{text} has {len(ids)} tokens; rows of {', '.join(map(str, lengths))} need "
                f"{sum(lengths)}: give a longer text, a smaller --prompt or fewer --tokens"
            )
    borders = np.cumsum([0, *lengths])
    return Rows(
        rows=tuple(tuple(ids[first:last]) for first, last in itertools.pairwise(borders)),
        source=str(text) if text else "verses of Ecclesiastes",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as UTF-8 text: {error}") from error
