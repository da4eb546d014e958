"""A strict reader of what is used of protobuf's text format, as a check of `config.pbtxt`."""

import re
from typing import Any

__all__ = ["read"]

TOKEN = re.compile(
    r'\s*(?:#[^\n]*\n\s*)*(?:(?P<text>"(?:[^"\\\n]|\\[0-7]{3})*")|(?P<word>[A-Za-z_]\w*|-?\d+)'
    r"|(?P<mark>[{}\[\]:,]))"
)

Message = dict[str, list[Any]]


def read(text: str) -> Message:
    """Return the fields of a message, each a list of its values in their order.

    Raises:
        ValueError: it is none.
    """
    tokens, place = [], 0
    text = text.rstrip()
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"no token at {text[place : place + 20]!r}")
        tokens.append(match[0].split("\n")[-1].strip() if match["text"] is None else match["text"])
        place = match.end()
    message, rest = _fields(tokens)
    if rest:
        raise ValueError(f"left over: {rest[:3]}")
    return message


def _fields(tokens: list[str]) -> tuple[Message, list[str]]:
    message: Message = {}
    while tokens and tokens[0] != "}":
        name, *tokens = tokens
        if not re.fullmatch(r"[a-z_]\w*", name):
            raise ValueError(f"{name} is no field")
        colon = tokens[0] == ":"
        tokens = tokens[colon:]
        if not colon and tokens[0] not in "[{":
            raise ValueError(f"{name} has no colon")
        if tokens[0] == "[":
            values, tokens = _list(tokens[1:])
        else:
            value, tokens = _value(tokens)
            values = [value]
        message.setdefault(name, []).extend(values)
    return message, tokens


def _list(tokens: list[str]) -> tuple[list[Any], list[str]]:
    values = []
    while True:
        value, tokens = _value(tokens)
        values.append(value)
        mark, *tokens = tokens
        if mark == "]":
            return values, tokens
        if mark != ",":
            raise ValueError(f"{mark} in a list")


def _value(tokens: list[str]) -> tuple[Any, list[str]]:
    first, *tokens = tokens
    if first == "{":
        message, tokens = _fields(tokens)
        if not tokens:
            raise ValueError("a message does not end")
        return message, tokens[1:]
    if first.startswith('"'):
        octal = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), first[1:-1])
        return octal.encode("latin-1").decode("utf-8", "surrogateescape"), tokens
    if re.fullmatch(r"-?\d+", first):
        return int(first), tokens
    if re.fullmatch(r"\w+", first):
        return first, tokens
    raise ValueError(f"{first} is no value")
