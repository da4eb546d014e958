"""Logits of a session for the tokens of a fixture, and how far they are from the original's."""

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.ort.session import OrtSession
from tests.conftest import Golden

__all__ = [
    "SAME",
    "TOLERANCE",
    "Floats",
    "Ints",
    "at",
    "decoded",
    "distance",
    "fed",
    "filled",
    "last_logits",
    "prefilled",
    "tokens_of",
]

# Against the original program. With the built-in kernels the activations go through as three 7-bit
# terms, which leaves out up to 5e-7 of a group's largest value; with native kernels those of a
# prompt may be rounded to 16 bits. The rest is the order of sums.
TOLERANCE = 3e-4

# Between two ways through the same engine: sums over more rows are taken in another order.
SAME = 1e-4

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def filled(session: OrtSession, value: float) -> OrtSession:
    """Fill the caches with one number and return the session."""
    for array in (*session.keys, *session.values):
        array[:] = value
    return session


def at(rows: int, position: int) -> Ints:
    """Return the same position for every row."""
    return np.full(rows, position, np.int64)


def tokens_of(golden: Golden) -> Ints:
    """Return the prompts, [2, S]."""
    return golden.arrays["tokens"].astype(np.int64)


def fed(golden: Golden) -> Ints:
    """Return what the prompts are continued with, [2, steps]."""
    return golden.arrays["f32/decode_tokens"].astype(np.int64)


def prefilled(session: OrtSession, tokens: Ints, *, chunk: int) -> Floats:
    """Return the logits of all tokens [B, S, V], computed so many tokens at a time."""
    rows, length = tokens.shape
    parts = [
        session.forward_all(tokens[:, first : first + chunk], at(rows, first))
        for first in range(0, length, chunk)
    ]
    return np.concatenate(parts, axis=1)


def decoded(session: OrtSession, tokens: Ints, *, after: int) -> Floats:
    """Return the logits [B, S, V] of tokens that come one by one after so many others."""
    rows = len(tokens)
    steps = [
        last_logits(session, column[:, None].copy(), at(rows, after + step), at(rows, 0))
        for step, column in enumerate(tokens.T)
    ]
    return np.stack(steps, axis=1)


def last_logits(session: OrtSession, tokens: Ints, start: Ints, last: Ints) -> Floats:
    """Return the logits of one token of each row, [B, V]."""
    logits = session.forward(tokens, start, last)
    assert logits is not None
    return logits


def distance(session: OrtSession, golden: Golden, *, chunk: int | None = None) -> float:
    """Return the largest difference of all prefill and decode logits from the original's."""
    tokens = tokens_of(golden)
    length = tokens.shape[1]
    prefill = prefilled(session, tokens, chunk=chunk or length)
    steps = decoded(session, fed(golden), after=length)
    found = np.concatenate([prefill, steps], axis=1)
    wanted = np.concatenate(
        [golden.arrays["f32/prefill_logits"], golden.arrays["f32/decode_logits"]], axis=1
    )
    return float(np.nan_to_num(np.abs(found - wanted), nan=np.inf).max())
