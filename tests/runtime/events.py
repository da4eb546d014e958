"""A model at work, told from a script: three requests on two rows, in the order of events."""

from collections.abc import Sequence

from export_grok.errors import BusyError, RequestError
from export_grok.runtime.observer import Load, Observer, Usage

__all__ = ["BATCH", "LENGTH", "SECRET", "USAGES", "load", "tell"]

BATCH, LENGTH = 2, 32
SECRET = "my password is swordfish"


def usage(prompt: int, cached: int, new: int, waited: float, first: float) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        new_tokens=new,
        waited_seconds=waited,
        first_token_seconds=first,
        decode_seconds=0.25 * max(new - 1, 0),
    )


# Of the requests a, b and c.
USAGES = (usage(5, 0, 2, 0.0, 0.5), usage(7, 4, 3, 0.0, 0.5), usage(9, 0, 0, 1.5, 0.0))


def load(running: int, waiting: int, used: int, kept: int) -> Load:
    """Return that of a cache of two rows."""
    return Load(
        batch=BATCH,
        running=running,
        waiting=waiting,
        cache_tokens=used,
        kept_tokens=kept,
        capacity=BATCH * LENGTH,
    )


def tell(observer: Observer, *, until: int | None = None) -> None:
    """Tell the events, or the first of them: a stops, b is cut by its limit, c is cancelled.

    Two more are refused, for two reasons.
    """
    a, b, c = USAGES
    events: Sequence[tuple[str, tuple[object, ...], dict[str, object]]] = [
        ("submitted", ("a",), {"prompt_tokens": a.prompt_tokens}),
        ("changed", (load(0, 1, 0, 0),), {}),
        ("submitted", ("b",), {"prompt_tokens": b.prompt_tokens}),
        ("submitted", ("c",), {"prompt_tokens": c.prompt_tokens}),
        ("changed", (load(0, 3, 0, 0),), {}),
        ("refused", (BusyError("1 request waits, as many as may"),), {}),
        ("refused", (RequestError(f"{SECRET!r} is too long"),), {}),
        ("started", ("a",), {"waited_seconds": a.waited_seconds, "cached_tokens": 0}),
        ("started", ("b",), {"waited_seconds": b.waited_seconds, "cached_tokens": 4}),
        ("token", ("a",), {"seconds": a.first_token_seconds, "first": True}),
        ("token", ("b",), {"seconds": b.first_token_seconds, "first": True}),
        ("stepped", (load(2, 1, 12, 0),), {"seconds": 0.5, "prefilled": 8, "decoded": 0}),
        ("token", ("a",), {"seconds": 0.25, "first": False}),
        ("token", ("b",), {"seconds": 0.25, "first": False}),
        ("stepped", (load(2, 1, 14, 0),), {"seconds": 0.25, "prefilled": 0, "decoded": 2}),
        ("finished", ("a",), {"reason": "stop", "usage": a, "error": None}),
        ("token", ("b",), {"seconds": 0.25, "first": False}),
        ("finished", ("b",), {"reason": "length", "usage": b, "error": None}),
        ("started", ("c",), {"waited_seconds": c.waited_seconds, "cached_tokens": 0}),
        ("stepped", (load(1, 0, 4, 16),), {"seconds": 0.25, "prefilled": 4, "decoded": 1}),
        ("finished", ("c",), {"reason": "cancelled", "usage": c, "error": None}),
        ("changed", (load(0, 0, 0, 20),), {}),
    ]
    for name, given, named in events[:until]:
        getattr(observer, name)(*given, **named)
