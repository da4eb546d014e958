"""One thing made wrong in bytes, in JSON, and in a folder."""

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

from scripts.fuzzing.files import Content, Files, Odd

__all__ = ["edited_bytes", "edited_json", "edited_table", "odd_entry", "prefixed_length"]

# What stands where something else should: other types, huge and special numbers, ways out.
WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "../../etc/passwd",
    "/etc/passwd",
    ".",
    "a\0b",
    "\ud800",
    [],
    [[]],
    ["x", 1],
    [-1],
    [10**18, 10**18],
    {},
    {"x": 1},
    {"../x": {}},
)
KEYS = ("", "x", "../x", "/x", "a\0b", "\ud800", "__proto__", "__class__")
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1)
# Text in the place of JSON, or in the middle of it.
TEXTS = (
    b"",
    b"{",
    b"}",
    b"[]",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"1" * 10_000,
    b"1e999",
    b"NaN",
    b"-Infinity",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b'"\\ud800"',
    b"\0",
    b",",
    b":",
)


def edited_bytes(
    content: bytes, random: Random, places: Sequence[tuple[int, int]] | None = None
) -> bytes:
    """Return bytes with one thing changed.

    Args:
        content: the bytes.
        random: decides what.
        places: first and last place of what matters in them; all of it by default.
    """
    data = bytearray(content)
    first, last = random.choice(places) if places else (0, len(data) - 1)
    at = min(max(0, random.randint(first, max(first, last))), max(0, len(data) - 1))
    count = random.choice((1, 1, 2, 4, 8, 16))
    match random.randrange(9):
        case 0 if data:
            data[at] ^= 1 << random.randrange(8)
        case 1 if data:
            data[at] = random.randrange(256)
        case 2:
            data[at:at] = random.randbytes(count)
        case 3:
            del data[at : at + count]
        case 4:
            data[at:at] = data[at : at + count * 4]
        case 5:
            other = random.randrange(max(1, len(data)))
            data[at : at + count] = data[other : other + count]
        case 6:
            width = random.choice((1, 2, 4, 8))
            number = random.choice(NUMBERS) + random.choice((-1, 0, 0, 1))
            order = random.choice(("little", "big"))
            data[at : at + width] = (number % 256**width).to_bytes(width, order)
        case 7:
            del data[at:]
        case _:
            data += random.randbytes(count)
    return bytes(data)


def edited_json(content: bytes, random: Random) -> bytes:
    """Return the text of some JSON with one thing changed: in what it says, or in the text."""
    kind = random.randrange(12)
    if kind < 9:
        try:
            value = json.loads(content)
        except (RecursionError, ValueError):
            return edited_bytes(content, random)
        if kind == 0 and random.randrange(4) == 0:
            value = copy.deepcopy(random.choice(WRONG))
        else:
            edited_table(value, random)
        return json.dumps(value).encode("utf-8", "surrogatepass")
    if kind == 9:
        at = random.randrange(len(content) + 1)
        return content[:at] + random.choice(TEXTS) + content[at:]
    if kind == 10 and random.randrange(4) == 0:
        return random.choice(TEXTS)
    return edited_bytes(content, random)


def edited_table(value: Any, random: Random) -> None:
    """Drop, rename, double or replace one entry of a table or list, at any depth, in place."""
    place, keys = value, _keys(value)
    while keys:
        key = random.choice(keys)
        inner = _keys(place[key])
        if inner and random.randrange(3):
            place, keys = place[key], inner
            continue
        _damage(place, key, random)
        return


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, list) else []


def _damage(place: Any, key: Any, random: Random) -> None:
    held = place[key]
    match random.randrange(8):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[random.choice(KEYS)] = place.pop(key)
        case 1:
            place.append(copy.deepcopy(held))
        case 2 | 3 if type(held) is int:
            place[key] = random.choice(
                (held + 1, held - 1, -held, held * 2, held << 32, held // 2, 0.5)
            )
        case 2 if isinstance(held, str):
            at = random.randrange(len(held) + 1)
            place[key] = held[:at] + random.choice((*KEYS, "é", "\n", "/..")) + held[at + 1 :]
        case 3:
            place[key] = copy.deepcopy(place[random.choice(_keys(place))])  # another's
        case _:
            place[key] = copy.deepcopy(random.choice(WRONG))


def prefixed_length(text: bytes, random: Random) -> bytes:
    """Return a header as safetensors has it: its length in 8 bytes, seldom the right one."""
    length = len(text)
    if random.randrange(8) == 0:
        length = random.choice((0, length + 1, length - 1, length * 2, 2**62, *NUMBERS))
    return (length % 2**64).to_bytes(8, "little") + text


def odd_entry(files: Files, random: Random, outside: str) -> None:
    """Take a file away, double it, or put something in its place that is none, in place.

    Args:
        files: by path.
        random: decides what.
        outside: path of a file elsewhere, for links.
    """
    name = random.choice(sorted(files))
    other = random.choice(sorted(files))
    links = (outside, "/dev/zero", "/dev/full", "/proc/self/mem", name, "nowhere", "..")
    entries: tuple[Content, ...] = (
        Odd("folder"),
        Odd("pipe"),
        Odd("link", random.choice(links)),
        files[other],
        b"",
    )
    match random.randrange(4):
        case 0:
            del files[name]
        case 1:
            files[f"{name}{random.choice(('x', '0', '.bak', ' '))}"] = files[name]
        case _:
            files[name] = random.choice(entries)
