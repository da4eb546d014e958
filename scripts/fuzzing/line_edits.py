"""One thing made wrong in a file of one JSON object a line."""

import json
from random import Random
from typing import Any

from scripts.fuzzing.edits import edited_bytes, edited_json

__all__ = ["edited_lines"]

# Characters of what is long, and parts of what has many.
MANY = 20_000
# Put before, behind or in the place of a line.
BETWEEN = (b"\r", b"\n", b"\x0b", b"\xef\xbb\xbf", b"\0", b"{}", b"  \t")
CODINGS = ("utf-16", "utf-32", "latin-1", "utf-7", "utf-8-sig")


def edited_lines(content: bytes, random: Random) -> bytes:
    """Return lines of JSON with one thing changed: in a line, or about the lines."""
    lines = content.split(b"\n")
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(14):
        case 0:
            return edited_bytes(content, random)
        case 1:
            del lines[at]
        case 2:
            lines.insert(other, lines[at])
        case 3:
            lines[at], lines[other] = lines[other], lines[at]
        case 4:
            lines[at] = _exchanged(lines[at], lines[other], random)
        case 5:
            lines[at] = _doubled(lines[at], random)
        case 6:
            lines[at] = _grown(lines[at], random)
        case 7:
            added = random.choice(BETWEEN)
            lines[at] = random.choice((lines[at] + added, added + lines[at], added))
        case 8:
            text = lines[at].decode(errors="replace")
            lines[at] = text.encode(random.choice(CODINGS), "replace")
        case 9 if random.randrange(4) == 0:
            added = random.choice((b"", b"{}", lines[at][:1000]))
            lines[at:at] = [added] * random.choice((99, 101, 5000))
        case _:
            lines[at] = edited_json(lines[at], random)
    return b"\n".join(lines)


def _exchanged(line: bytes, other: bytes, random: Random) -> bytes:
    """Return an object with a value that another one has, by its name there or one here."""
    mine, theirs = _object(line), _object(other)
    if not theirs:
        return edited_bytes(line, random)
    name = random.choice(list(theirs))
    mine[random.choice((name, *mine))] = theirs[name]
    return json.dumps(mine).encode()


def _doubled(line: bytes, random: Random) -> bytes:
    """Return an object with some name twice."""
    mine = _object(line)
    if not mine:
        return line + line
    name = random.choice(list(mine))
    again = f"{{{json.dumps(name)}: {json.dumps(mine[name])}, "
    return line.replace(b"{", again.encode(), 1)


def _grown(line: bytes, random: Random) -> bytes:
    """Return an object with something very long or of very many parts by some name."""
    many: Any = random.choice(
        (
            "x" * MANY * 10,
            "é " * MANY,
            [random.choice((5, 10**18, -1, "x"))] * MANY,
            {str(number): 0.5 for number in range(MANY)},
            {"x" * number: number for number in range(100)},
        )
    )
    mine = _object(line)
    if random.randrange(3) == 0 and isinstance(many, dict):
        mine |= many
    else:
        mine[random.choice([*mine, "y" * MANY])] = many
    text = json.dumps(mine)
    if random.randrange(3) == 0:
        text = text.replace(f'"{MANY - 2}":', f'"{MANY - 1}":')  # twice, late
    return text.encode()


def _object(line: bytes) -> dict[str, Any]:
    """Return what an object has, or nothing."""
    try:
        value = json.loads(line)
    except (RecursionError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
