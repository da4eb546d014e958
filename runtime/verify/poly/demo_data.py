"""What the demo model computes on a text, spread over the width of another model.

Activations of a trained model are not normal: a few channels are large in every token, and tails
are heavy. So that a graph meets such inputs, the demo that is shipped reads some verses, and what
it computes at the same relative depth is taken: channels, and heads of the caches, are repeated
until the width is filled, the repeated ones with signs drawn at random. Signs leave the size of
every channel as it is, and keep repeated ones from adding up.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 by it
import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import TOKENIZER
from export_grok.config import Dtype, GrokConfig
from export_grok.engines.probe import GraphName
from export_grok.export.checkpoint import open_weights
from export_grok.export.demo import DEMO_MODEL
from export_grok.optional import require
from export_grok.runtime.text.tokenizer import Tokenizer
from export_grok.runtime.verify.rows import TEXT, lengths_of
from export_grok.runtime.verify.steps import Step, faint, steps_of

if TYPE_CHECKING:
    from export_grok.runtime.torch_probe import TorchProbe

__all__ = ["Activations", "Reading"]

# Tokens of each row that come singly, and those of a prompt that come at once.
DECODE = 4
CHUNK = 12

Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What goes into a layer or a head; letters are the legend of `export.model`.

    Attributes:
        hidden: residual stream of each step [B, S, M].
        keys: of all tokens of all steps [B, Hkv, T, D].
        values: of them [B, Hkv, T, D].
    """

    hidden: tuple[Array, ...]
    keys: Array
    values: Array


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Verses, read in rows of different length.

    Attributes:
        batch: rows, B.
        longest: tokens of the longest row.
        slots: of the caches, T.
        seed: of what is drawn at random, and of where in the text a row begins.
    """

    batch: int
    longest: int
    slots: int
    seed: int = 0

    def steps(self, vocab_size: int) -> tuple[Step, ...]:
        """Return the steps, with ids of a vocabulary in place of those of the demo's.

        Ids keep their order and how often they occur. The first and the last of the vocabulary
        occur too. The last step is a faint one.
        """
        demo = _demo().config.vocab_size
        within = np.random.default_rng(self.seed).integers(0, max(1, vocab_size // demo), demo)
        new = np.arange(demo) * vocab_size // demo + within
        tokens = [new[step.tokens] for step in _steps(self)]
        tokens[0][0, 0], tokens[-1][0, 0] = 0, vocab_size - 1
        steps = [
            dataclasses.replace(step, tokens=ids)
            for step, ids in zip(_steps(self), tokens, strict=True)
        ]
        return (*steps, faint(steps[0]))

    def activations(self, config: GrokConfig, graph: GraphName, dtype: Dtype) -> Activations:
        """Return what goes into a layer or a head of another model.

        Args:
            config: of the other model.
            graph: a layer takes what goes into the demo's at the same relative depth.
            dtype: of the graph. Numbers are ones that it has, so that all are given the same.

        Raises:
            MissingDependencyError: torch is not installed.
        """
        demo, layers = _demo().config.num_layers, config.num_layers
        depth = demo if graph.layer is None else graph.layer * demo // layers
        given = _activations(self, depth)
        random = np.random.default_rng([self.seed, graph.layer or 0])
        channels = _Spread.over((config.emb_size,), given.hidden[0].shape[2:], random)
        width, axes = (config.num_kv_heads, 1, config.key_size), given.keys.shape
        heads = [_Spread.over(width, (axes[1], 1, axes[3]), random) for _ in "kv"]

        fed = [channels(h) for h in given.hidden]
        fed.append(fed[0] * np.float32(faint(_steps(self)[0]).gain))
        return Activations(
            hidden=tuple(_rounded(h, dtype) for h in fed),
            keys=_rounded(heads[0](given.keys), dtype),
            values=_rounded(heads[1](given.values), dtype),
        )


@dataclass(frozen=True, kw_only=True)
class _Spread:
    """Repeats the last axes of an array until they are of other lengths, or cuts them.

    Attributes:
        signs: of the other lengths; 1 where an axis is left as it is.
    """

    signs: Array

    @classmethod
    def over(
        cls, lengths: tuple[int, ...], own: tuple[int, ...], random: np.random.Generator
    ) -> "_Spread":
        signs = random.choice(np.array([-1, 1], np.float32), lengths)
        signs[tuple(map(slice, own))] = 1
        return cls(signs=signs)

    def __call__(self, array: Array) -> Array:
        for axis in range(-self.signs.ndim, 0):
            if self.signs.shape[axis] > 1:
                places = np.arange(self.signs.shape[axis]) % array.shape[axis]
                array = array.take(places, axis=axis)
        return array * self.signs


@functools.cache
def _demo() -> "TorchProbe":
    require("torch", extra="verify")
    from export_grok.runtime.torch_probe import TorchProbe

    return TorchProbe(*open_weights(DEMO_MODEL))


@functools.cache
def _steps(reading: Reading) -> tuple[Step, ...]:
    ids = np.array(Tokenizer(DEMO_MODEL / TOKENIZER).encode(TEXT))
    ids = np.roll(ids, -reading.seed * reading.longest)
    decode = min(DECODE, reading.longest - 1)
    lengths = lengths_of(reading.batch, prompt=reading.longest - decode, tokens=decode)
    borders = np.cumsum([0, *lengths])
    rows = [ids[first:last].tolist() for first, last in itertools.pairwise(borders)]
    return steps_of(rows, decode=decode, chunk=CHUNK, max_length=reading.slots)


@functools.cache
def _activations(reading: Reading, depth: int) -> Activations:
    """Return what the demo computes before its layer `depth`, and that layer's caches."""
    probe, steps = _demo(), _steps(reading)
    config = probe.config
    with probe.graph(GraphName(kind="embedding")) as run:
        after = [run({"tokens": step.tokens})["h"] for step in steps]
    shape = (reading.batch, config.num_kv_heads, reading.slots, config.key_size)
    before = after
    for layer in range(min(depth + 1, config.num_layers)):
        before, after = after, []
        keys = values = np.zeros(shape, np.float32)
        with probe.graph(GraphName(kind="layer", layer=layer)) as run:
            for step, h in zip(steps, before, strict=True):
                found = run({"h": h, "start": step.start, "k_cache": keys, "v_cache": values})
                keys, values = found["k_out"], found["v_out"]
                after.append(found["h_out"])
    hidden = after if depth == config.num_layers else before
    return Activations(hidden=tuple(hidden), keys=keys, values=values)


def _rounded(array: Array, dtype: Dtype) -> Array:
    """Return the array with the numbers that the dtype has."""
    rounded: Array = array.astype(dtype).astype(np.float32)
    return rounded
