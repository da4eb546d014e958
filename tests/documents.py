"""The commands and programs that a document shows, so that a test can run them."""

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "blocks", "links"]

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = "<!-- not run in the tests: "


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        run: whether a test has to run it; not if the line before it says so.
    """

    language: str
    text: str
    run: bool


def blocks(text: str) -> list[Block]:
    """Return the blocks of a document that hold commands or Python, in their order."""
    pattern = re.compile(r"(?P<before>.*)\n```(?P<language>bash|python)\n(?P<text>.*?)```", re.S)
    found = []
    for part in text.split("\n```\n")[:-1]:
        match = pattern.fullmatch(part + "\n```")
        if match:
            last = match["before"].rstrip().splitlines()[-1]
            found.append(Block(match["language"], match["text"], not last.startswith(NOT_RUN)))
    return found


def links(text: str) -> list[str]:
    """Return the files that a document links to, as it writes them."""
    return re.findall(r"\]\((?!http)([^)#]+)\)", text)
