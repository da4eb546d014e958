"""A prompt from a file."""

import sys
from pathlib import Path

from export_grok.errors import RequestError
from export_grok.regular_file import read_regular

__all__ = ["STDIN", "read_prompt"]

STDIN = Path("-")


def read_prompt(path: Path) -> str:
    """Return the text of a file, all of it; of standard input for "-".

    Raises:
        RequestError: it cannot be read, or is no UTF-8.
    """
    try:
        content = sys.stdin.buffer.read() if path == STDIN else read_regular(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is no UTF-8: byte {content[error.start]:#04x} at {error.start}; a prompt is "
            "Unicode text"
        ) from error
