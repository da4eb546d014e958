"""Whatever rows and tokens a service meets, memory stays what the largest step needs."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.engines.ort import chains as chains_module
from export_grok.engines.ort.chains import Chains, Span, Workspace

WIDTH = 3

Array = NDArray[np.float32] | NDArray[np.int64]


@dataclass
class Bound:
    """A chain that knows the memory it is bound to."""

    tokens: NDArray[np.int64]
    start: NDArray[np.int64]
    stream: NDArray[np.float32]

    def run(self, tokens: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.float32]:
        raise NotImplementedError


def bound(span: Span, workspace: Workspace) -> Bound:
    shape = (span.rows, span.tokens, WIDTH)
    return Bound(workspace.tokens(span), workspace.start(span), workspace.stream("h", shape))


def address(array: Array) -> int:
    return array.ctypes.data


def test_a_chain_is_made_once_and_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains_module, "KEPT", 3)
    made: list[Span] = []

    def make(span: Span, workspace: Workspace) -> Bound:
        made.append(span)
        return bound(span, workspace)

    chains = Chains()
    spans = [Span(first, 1, 4) for first in range(4)]
    for number in (0, 1, 2, 0, 3, 0, 2, 1):
        chains.of(spans[number], make)
    assert made == [spans[number] for number in (0, 1, 2, 3, 1)]


def test_all_chains_share_the_memory_of_the_largest() -> None:
    chains = Chains()
    largest = chains.of(Span(0, 4, 8), bound)
    assert isinstance(largest, Bound)
    for span in (Span(0, 1, 1), Span(3, 2, 5), Span(2, 8, 4), Span(1, 1, 32)):
        chain = chains.of(span, bound)
        assert isinstance(chain, Bound)
        assert chain.tokens.shape == (span.rows, span.tokens)
        assert chain.start.shape == (span.rows,)
        assert chain.stream.shape == (span.rows, span.tokens, WIDTH)
        for array, whole in (
            (chain.tokens, largest.tokens),
            (chain.start, largest.start),
            (chain.stream, largest.stream),
        ):
            assert address(array) == address(whole)
            assert array.flags.c_contiguous


def test_a_step_of_more_tokens_leaves_no_chain_with_the_memory_before() -> None:
    chains = Chains()
    small = Span(0, 2, 3)
    before = chains.of(small, bound)
    chains.of(Span(0, 1, 7), bound)
    after = chains.of(small, bound)
    assert after is not before
    assert isinstance(after, Bound)
    assert isinstance(before, Bound)
    assert address(after.stream) != address(before.stream)
    assert chains.of(small, bound) is after


def test_what_goes_into_a_step_does_not_overlap() -> None:
    workspace, span = Workspace(12), Span(0, 3, 4)
    arrays: list[Array] = [
        workspace.tokens(span),
        workspace.start(span),
        workspace.stream("even", (3, 4, WIDTH)),
        workspace.stream("odd", (3, 4, WIDTH)),
    ]
    for number, array in enumerate(arrays):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert address(workspace.stream("odd", (1, 1, WIDTH))) == address(arrays[3])


def test_a_span_of_a_cache_is_the_same_memory() -> None:
    cache = np.zeros((5, 2, 3, 4), np.float32)
    part = Span(2, 2, 9).of(cache)
    part[:] = 1
    assert part.flags.c_contiguous
    assert cache.any(axis=(1, 2, 3)).tolist() == [False, False, True, True, False]
