"""Damage to JSON files, for tests that hold a reader to its one error."""

import copy
from typing import Any

from hypothesis import strategies as st

__all__ = ["damaged"]

# What stands where something else should: other types, huge and special numbers, ways out.
_WRONG: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        -1,
        1,
        2**31,
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
    ]
).map(copy.deepcopy)


@st.composite
def damaged(draw: st.DrawFn, whole: dict[str, Any]) -> dict[str, Any]:
    """Return `whole` with one to three keys or entries dropped, renamed, doubled or replaced."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(inner, (dict, list)) and inner and draw(st.booleans()):
                place = inner
                continue
            _damage(draw, place, key)
            break
    return value


def _damage(draw: st.DrawFn, place: Any, key: Any) -> None:
    how = draw(st.sampled_from(["drop", "replace", "replace", "rename"]))
    if how == "drop":
        del place[key]
    elif how == "replace" or isinstance(place, list):
        place[key] = draw(_WRONG)
    else:
        place[draw(st.sampled_from(["", "x", "../x", "/x", "a\0b", "\ud800"]))] = place.pop(key)
