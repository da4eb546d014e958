"""How figures and places are said."""

import itertools
import math

from export_grok.runtime.verify.result import Deviation, Place

__all__ = ["counted", "digits", "error_words", "number", "pair", "percent", "place_words"]


def error_words(dtype: str) -> str:
    """Return what the error of a tensor is, without a full stop."""
    if dtype == "float32":
        return "the largest difference in a token, over the rms of the reference's token"
    return "the rms of the differences in a token, over that of the reference's; mean of tokens"


def place_words(deviation: Deviation, place: Place) -> str:
    """Return a place with its axes named."""
    by_tensor = {"logits": ("token id",), "experts": ("choice",), "gates": ("choice",)}
    by_axes = {1: ("channel",), 2: ("head", "channel")}
    axes = by_tensor.get(deviation.tensor) or by_axes.get(len(place.index), ())
    index = [
        f"{axis} {part}" for axis, part in itertools.zip_longest(axes, place.index, fillvalue="")
    ]
    return ", ".join([f"row {place.row}", f"position {place.position}", *index])


def number(value: float) -> str:
    """Return two digits, or all before the point if they are few."""
    if not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 or value == 0 else f"{value:.2g}"


def digits(value: float, *, beside: float) -> str:
    """Return six digits of a value, or nine if six do not tell it from the other."""
    short = f"{value:.6g}"
    return f"{value:.9g}" if short == f"{beside:.6g}" and value != beside else short


def percent(share: float) -> str:
    """Return a share so that only all is 100 %, and only nothing is 0 %."""
    text = f"{share:.2%}" if share < 0.01 else f"{share:.1%}"
    if share < 1 and text == "100.0%":
        return "over 99.9%"
    return "under 0.01%" if share > 0 and text == "0.00%" else text.replace(".0%", "%")


def pair(found: float, wanted: float) -> str:
    return f"engine {digits(found, beside=wanted)}, reference {digits(wanted, beside=found)}"


def counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + ("" if count == 1 else "s")
