"""Run a bundle in ONNX Runtime: one session a graph, the cache written in place.

With native kernels (`plugins.kernels`) the stamped graphs run as they are: the library's ops stand
for the op nodes. Without, the lowered graphs run by what ONNX Runtime has built in.

Keys, values and the residual stream live in arrays that are allocated once. They are bound by
address, input and output of a cache to one memory, so a step copies no cache and allocates none.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, graph_file
from export_grok.config import RankConfig
from export_grok.engines.arguments import check_copy, check_tokens, checked_last, checked_rows
from export_grok.engines.ort.chains import Chain, Chains, Span, Workspace
from export_grok.engines.ort.graphs import (
    Array,
    bound,
    head_options,
    load_graph,
    run_bound,
    session_options,
)
from export_grok.engines.ort.places import Places, Swap
from export_grok.errors import ConfigError
from export_grok.plugins.kernels import native_kernels
from export_grok.progress import progress_bar

__all__ = ["CachedSession", "OrtSession", "open_engine"]


def open_engine(
    bundle: Bundle, *, batch: int, max_length: int, threads: int | None = None
) -> "OrtSession":
    """Return the loaded engine; see `engines.backend.open_session`.

    Raises:
        ConfigError: it is shared by ranks, each of which loads its own.
    """
    ranks = bundle.manifest.engine.get("tensor_parallel", 1)
    if ranks != 1:
        raise ConfigError(
            f"{bundle.folder} is an engine of {ranks} ranks, and this session is one process; "
            "open it by export_grok.runtime.open, or build one without --tp"
        )
    return OrtSession(bundle, batch=batch, max_length=max_length, threads=threads)


class CachedSession(ABC):
    """What the session of a whole model and that of one rank have in common.

    Attributes:
        config: of the model.
        batch: rows, B.
        max_length: slots of the cache for each row, T.
        prefill_rows: all.
        kernels: which run.
        keys: for each layer float32 [B, Hkv, T, D]; one of several ranks has its share of Hkv.
            Rows lie in the order of their numbers until a call names some that lie apart.
        values: for each layer, likewise.
    """

    def __init__(self, rank: RankConfig, *, batch: int, max_length: int) -> None:
        self.config = rank.model
        self.batch = batch
        self.max_length = max_length
        self.prefill_rows = batch
        self.kernels = native_kernels()
        self._entries = rank.vocab_size
        shape = (batch, rank.num_kv_heads, max_length, rank.model.key_size)
        # zeros() takes pages from the system when they are first written.
        self.keys = [np.zeros(shape, np.float32) for _ in range(rank.model.num_layers)]
        self.values = [np.zeros(shape, np.float32) for _ in range(rank.model.num_layers)]
        self._places = Places(batch)
        self._heads: dict[str, ort.InferenceSession] = {}
        self._chains = Chains()

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens into the cache; return the logits of one token of each row, [R, V].

        One of several ranks has those of its share of V.
        """
        rows = checked_rows(self, rows)
        if last is not None:
            last = checked_last(self, last, tokens, rows)
        order, hidden = self._run_layers(tokens, start, rows)
        if last is None:
            return None
        logits = self._run_head("head", {"h": hidden, "last": last[order]}, (len(rows),))
        return _back(logits, order)

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the logits of every token, [B, S, V]."""
        order, hidden = self._run_layers(tokens, start, checked_rows(self, None))
        return _back(self._run_head("head_all", {"h": hidden}, hidden.shape[:2]), order)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens that a row holds those of another, as if computed for it."""
        check_copy(self, source, target, length)
        from_place, to_place = self._places.of(source), self._places.of(target)
        for cache in (*self.keys, *self.values):
            cache[to_place, :, :length] = cache[from_place, :, :length]
        self._places.holds(np.array([target]), length)

    @abstractmethod
    def _load_head(self, kind: str) -> ort.InferenceSession: ...

    @abstractmethod
    def _new_chain(self, span: Span, workspace: Workspace) -> Chain: ...

    def _run_layers(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the order that the rows lie in, and the stream behind the last layer so."""
        check_tokens(self, tokens, start, rows)
        first, swaps = self._places.gather(rows)
        for swap in swaps:
            for cache in (*self.keys, *self.values):
                _swap(cache, swap)
        self._places.holds(rows, start + tokens.shape[1])
        order = self._places.order(first, rows)
        chain = self._chains.of(Span(first, *tokens.shape), self._new_chain)
        return order, chain.run(tokens[order], start[order])

    def _run_head(
        self, kind: str, inputs: dict[str, Array], lead: tuple[int, ...]
    ) -> NDArray[np.float32]:
        if kind not in self._heads:
            self._heads[kind] = self._load_head(kind)
        session = self._heads[kind]
        logits = np.empty((*lead, self._entries), np.float32)
        run_bound(session, bound(session, inputs, {"logits": logits}))
        return logits


class OrtSession(CachedSession):
    """The graphs of a bundle, loaded, and a cache for `batch` rows of `max_length` tokens.

    Raises:
        BundleError: a graph does not load.
    """

    def __init__(
        self, bundle: Bundle, *, batch: int, max_length: int, threads: int | None = None
    ) -> None:
        super().__init__(bundle.config.for_rank(1), batch=batch, max_length=max_length)
        self._folder = bundle.folder
        self._options = session_options(bundle.weights_root, threads, self.kernels)
        self._head_options = head_options(bundle.head_root, threads, self.kernels)
        self._embedding = self._load("embedding", self._options)
        self._layers = []
        with progress_bar("loading", self.config.num_layers, unit="layers") as advance:
            for layer in range(self.config.num_layers):
                self._layers.append(self._load("layer", self._options, layer))
                advance(1)

    def _new_chain(self, span: Span, workspace: Workspace) -> "_Chain":
        return _Chain(self, self._embedding, self._layers, span, workspace)

    def _load_head(self, kind: str) -> ort.InferenceSession:
        return self._load(kind, self._head_options)

    def _load(
        self, kind: str, options: ort.SessionOptions, layer: int | None = None
    ) -> ort.InferenceSession:
        variant = "" if self.kernels.library else "ort"
        return load_graph(self._folder / graph_file(kind, layer, variant=variant), options)


class _Chain:
    """Embedding and layers bound to their memory for some rows and a number of new tokens."""

    def __init__(
        self,
        session: OrtSession,
        embedding: ort.InferenceSession,
        layers: Sequence[ort.InferenceSession],
        span: Span,
        workspace: Workspace,
    ) -> None:
        shape = (span.rows, span.tokens, session.config.emb_size)
        self._tokens, self._start = workspace.tokens(span), workspace.start(span)
        # Layer by layer the residual stream goes from one of two arrays to the other.
        # A binding knows addresses only: what it names must live as long as it does.
        streams = [workspace.stream(name, shape) for name in ("even", "odd")]
        self._streams = streams
        self._steps = [(embedding, bound(embedding, {"tokens": self._tokens}, {"h": streams[0]}))]
        for number, layer in enumerate(layers):
            h, h_out = streams[number % 2], streams[(number + 1) % 2]
            keys, values = span.of(session.keys[number]), span.of(session.values[number])
            inputs: dict[str, Array] = {
                "h": h,
                "start": self._start,
                "k_cache": keys,
                "v_cache": values,
            }
            outputs = {"h_out": h_out, "k_out": keys, "v_out": values}
            self._steps.append((layer, bound(layer, inputs, outputs)))
        self._hidden = streams[len(layers) % 2]

    def run(self, tokens: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the residual stream behind the last layer; good until the next run of any."""
        self._tokens[:] = tokens
        self._start[:] = start
        for session, binding in self._steps:
            run_bound(session, binding)
        return self._hidden


def _back(logits: NDArray[np.float32], order: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return rows that came in an order [R, ...] as they were asked for."""
    if (order[:-1] < order[1:]).all():
        return logits
    back = np.empty_like(logits)
    back[order] = logits
    return back


def _swap(cache: NDArray[np.float32], swap: Swap) -> None:
    """Let two places of a cache [B, Hkv, T, D] change what they hold."""
    (one, other), (held, others) = swap.places, swap.lengths
    kept = cache[one, :, :held].copy()
    cache[one, :, :others] = cache[other, :, :others]
    cache[other, :, :held] = kept
