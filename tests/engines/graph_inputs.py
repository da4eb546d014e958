"""Inputs of single graphs: rows that begin at different places, in caches full of noise."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.engines.probe import GraphName, Probe

__all__ = ["SLOTS", "START", "Arrays", "distances", "inputs_of", "names_of", "ran", "written"]

Arrays = dict[str, NDArray[Any]]

START = np.array([0, 4, 9])
SLOTS = 20


def names_of(config: GrokConfig) -> Iterator[GraphName]:
    """Return all graphs of a model in the order of computing."""
    yield GraphName(kind="embedding")
    for layer in range(config.num_layers):
        yield GraphName(kind="layer", layer=layer)
    yield GraphName(kind="head")
    yield GraphName(kind="head_all")


def inputs_of(config: GrokConfig, name: GraphName, tokens: int) -> Arrays:
    """Return inputs of a graph for so many new tokens of three rows; the same each time."""
    random = np.random.default_rng([tokens, name.layer or 0])
    rows = len(START)

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape, np.float32)

    if name.kind == "embedding":
        return {"tokens": random.integers(0, config.vocab_size, (rows, tokens))}
    inputs: Arrays = {"h": normal(rows, tokens, config.emb_size)}
    if name.kind == "head":
        inputs["last"] = np.minimum([tokens - 1, 0, 2], tokens - 1)
    if name.kind == "layer":
        cache = (rows, config.num_kv_heads, SLOTS, config.key_size)
        inputs |= {"start": START.copy(), "k_cache": normal(*cache), "v_cache": normal(*cache)}
    return inputs


def written(tokens: int) -> NDArray[np.bool_]:
    """Return which slots of the caches so many new tokens are written to, [B, T]."""
    slot = np.arange(SLOTS) - START[:, np.newaxis]
    found: NDArray[np.bool_] = (slot >= 0) & (slot < tokens)
    return found


def ran(probe: Probe, name: GraphName, inputs: Arrays) -> Arrays:
    """Return outputs and taps of one graph."""
    with probe.graph(name) as run:
        return run(inputs)


def distances(found: Arrays, wanted: Arrays) -> dict[str, float]:
    """Return how far each tensor is off, by what its values are like; infinite for no number."""
    return {
        name: float(
            np.nan_to_num(np.abs(array - wanted[name]), nan=np.inf).max()
            / np.sqrt(np.square(wanted[name], dtype=np.float64).mean())
        )
        for name, array in found.items()
    }
